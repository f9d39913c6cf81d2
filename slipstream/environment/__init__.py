"""Tools and environments that answer the policy during an episode.

`countdown`, `data_buffer`, `registry`, `rlhf_dataset`, `samplers`, `sft` and `tokenizer` are old
import paths of `slipstream.data`. Each of them warns and re-exports.
"""
