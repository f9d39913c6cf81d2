"""Old import paths of `slipstream.data`. Each module here warns and re-exports."""
