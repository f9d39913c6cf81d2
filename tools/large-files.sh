#!/usr/bin/env bash
# Fails if a given file is over 500 kB: checkpoints and data do not belong in the repository.
set -uo pipefail
limit=500000
status=0
for file in "$@"; do
  size=$(wc -c <"$file")
  if [ "$size" -gt "$limit" ]; then
    echo "$file: $size bytes, the limit is $limit; keep it outside the repository" >&2
    status=1
  fi
done
exit "$status"
