#!/usr/bin/env bash
# readme.sh ZEROPLAN SOURCE: runs every "$ zeroplan ..." of README.md in order, in one folder. Exit 0, or the code that the line
# names ("# exit 1"). Then compares the shown output with what the program prints.
set -uo pipefail
zeroplan="$(realpath -- "${1:?the program}")"
source="$(realpath -- "${2:?the source folder}")"
work="$(mktemp -d)"
trap 'rm -rf -- "$work"' EXIT
cd -- "$work" || exit 2
cp -r -- "$source/examples" .
failed=0 total=0
while IFS= read -r line; do
  command="${line#"$ zeroplan "}"
  wanted=0
  [[ "$command" =~ '# exit '([0-9]+) ]] && wanted="${BASH_REMATCH[1]}"
  ((total += 1))
  read -ra words <<<"${command%%#*}"
  timeout 900 "$zeroplan" "${words[@]}" >out 2>err </dev/null
  code=$?
  if ((code != wanted)) || [[ ! -s out ]]; then
    ((failed += 1))
    printf 'FAILED (exit %d): %s\n' "$code" "$line"
    cat err
  fi
done < <(grep '^\$ zeroplan ' "$source/README.md")
if ! ZEROPLAN="$zeroplan" bash "$source/scripts/readme" --check; then ((failed += 1)); fi
printf '%d commands of README.md, %d failed\n' "$total" "$failed"
((total > 0 && failed == 0))
