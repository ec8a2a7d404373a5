#!/usr/bin/env bash
# The tiny checkpoint of this folder: imported, verified, exported, compared, continued. Usage: demo.sh SCRATCH
set -euo pipefail
source="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/tiny-qwen3"
scratch="${1:-.demo}"
rm -rf "$scratch" && mkdir -p "$scratch" && cd "$scratch"

step() { printf '\n$ %s\n' "$*"; "$@"; }

step dewconv inspect "$source"
step dewconv import "$source" banks
step dewconv export banks exported
step dewconv diff "$source" exported
step dewconv generate banks --prompt "A rule" --max-new-tokens 90
step dewconv verify banks --report report
printf '\n%s\n\n' "$PWD/report/report.html; as Markdown:"
cat report/report.md
