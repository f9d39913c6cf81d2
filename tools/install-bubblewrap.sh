#!/usr/bin/env bash
# Installs bubblewrap, by which code that a model wrote is isolated, where this user may; else says
# how. Never fails: what needs it says so itself.
set -u
command -v bwrap >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing bubblewrap"
  { apt-get install -y -q bubblewrap || { apt-get update -q && apt-get install -y -q bubblewrap; }; } \
    >/dev/null 2>&1
  command -v bwrap >/dev/null && exit 0
fi
echo "bubblewrap is not here, so that tests of the code sandbox are left out; to have them:"
echo "  sudo apt install bubblewrap"
exit 0
