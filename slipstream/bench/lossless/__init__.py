"""`slipstream bench lossless`: speculative decoding against plain decoding, bit for bit."""
