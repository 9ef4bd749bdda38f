#!/usr/bin/env bash
# isa_symbols_test.sh NM ARCHIVE: fails when an object *_avx*.cpp.o of the archive defines a weak symbol. The linker keeps
# one copy of those for the whole program, and it may be the one with AVX instructions.
set -uo pipefail
nm="${1:?nm}" archive="${2:?archive}"
symbols="$("$nm" -A -C "$archive")" || exit 2
objects="$(grep -cE '_avx[0-9]+\.cpp\.o:.* T ' <<<"$symbols")"
[[ "$objects" -ge 6 ]] || { echo "expected at least 6 functions in *_avx*.cpp.o, found $objects"; exit 1; }
# DW.ref.*, which sanitizers bring, is an address for unwinding: no instruction is in it.
weak="$(grep -E '_avx[0-9]+\.cpp\.o:.* [WVu] ' <<<"$symbols" | grep -vF ' V DW.ref.')" || exit 0
printf '%s\n' "$weak"
exit 1
