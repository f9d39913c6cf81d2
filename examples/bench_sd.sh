#!/usr/bin/env bash
# Measures which draft depth, width and number of tokens to verify are fastest for your policy. This
# is what FastRL's script of this name measures; a further column shows plain decoding.
#
#   RUN=runs/mine examples/bench_sd.sh
#   RUN=runs/mine examples/bench_sd.sh --device cuda     # any flag of `slipstream bench speculation`
set -euo pipefail

run=${RUN:-runs/bench-model}    # a run folder with a policy, and its draft head in `draft`

slipstream bench speculation --policy "$run" --batch 1 2 4 \
    --plan 1_1_2 3_1_4 5_1_6 7_1_8 4_4_16 8_4_32 8_4_48 --rounds 2 \
    --plot "$run/bench_sd.png" --json "$run/bench_sd.json" "$@"
