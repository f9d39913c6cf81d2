"""`slipstream bench lossless`: drafts against plain decoding, compared bit for bit."""
