#!/usr/bin/env bash
# How deep to draft, how wide, and how many tokens to verify, for a policy of yours: what FastRL's
# script of this name measures, with plain decoding as a column.
#
#   RUN=runs/mine examples/bench_sd.sh                   # flags of `slipstream bench speculation`
#   RUN=runs/mine examples/bench_sd.sh --device cuda     # may follow
set -euo pipefail

run=${RUN:-runs/bench-model}    # a run folder with a policy and, in `draft`, its head

slipstream bench speculation --policy "$run" --batch 1 2 4 \
    --plan 1_1_2 3_1_4 5_1_6 7_1_8 4_4_16 8_4_32 8_4_48 --rounds 2 \
    --plot "$run/bench_sd.png" --json "$run/bench_sd.json" "$@"
