# Sourced: expectations on runs of "$zeroplan" in the current folder, whose output is in the files out and err.
failed=0 total=0

# expect WHAT COMMAND...: the command succeeds.
expect() {
  ((total += 1))
  if ! "${@:2}"; then
    printf 'FAILED: %s\n' "$1"
    tail -n 5 err 2>/dev/null | head -c 1000
    ((failed += 1))
  fi
}
run() { timeout 600 "$zeroplan" "$@" >out 2>err </dev/null; }
# exits CODE ARGUMENT...
exits() {
  local code="$1"
  shift
  run "$@"
  (($? == code))
}
out_has() { grep -qF -- "$1" out; }
err_has() { grep -qF -- "$1" err; }
# refused PART ARGUMENT...: exit 2, nothing on stdout, PART in one line on stderr.
refused() {
  local part="$1" code
  shift
  ((total += 1))
  run "$@"
  code=$?
  if ((code != 2)) || [[ -s out ]] || (($(wc -l <err) != 1)) || ! err_has "$part"; then
    printf 'FAILED (exit %d, wanted "%s"): %s\n  %s\n' "$code" "$part" "${*@Q}" "$(head -c 300 err)"
    ((failed += 1))
  fi
}
