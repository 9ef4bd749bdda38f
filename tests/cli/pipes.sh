#!/usr/bin/env bash
# pipes.sh ZEROPLAN EXAMPLES: each command that reads a text file takes it from a pipe too and answers the same; what has no
# end, holds no text or has no writer is refused.
set -uo pipefail
zeroplan="$(realpath -- "${1:?the program}")"
examples="$(realpath -- "${2:?the folder of examples}")"
here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
work="$(mktemp -d)"
trap 'rm -rf -- "$work"' EXIT
cd -- "$work" || exit 2
source "$here/expect.sh"

small=(--gpus 2x3090-24G --seq-len 64 --global-batch 64)
run plan --model "$examples/tiny-llama.json" --machine "$examples/machine.json" --seq-len 64 --global-batch 64 --out made
cp "$examples/tiny-llama.json" piped.json  # what a model from a pipe is called

# The answer without the name of its input and the time that a search took.
same_words() { sed "s|$1|FILE|g; s|, in [0-9.]* m\?s$||" out; }
# piped FILE BEFORE AFTER: the file named between the two, and the same bytes through a pipe of each kind.
piped() {
  local file="$1" before after named=() kind code
  read -ra before <<<"$2"
  read -ra after <<<"$3"
  run "${before[@]}" "$file" "${after[@]}"
  code=$?
  same_words "$file" >wanted
  expect "the file: ${before[*]} $file" test -s wanted
  mkfifo named-pipe
  for kind in /dev/stdin /dev/fd/9 named-pipe; do
    named=("${before[@]}" "$kind" "${after[@]}")
    if [[ "$kind" == named-pipe ]]; then timeout 20 cat "$file" >named-pipe & fi
    timeout 600 "$zeroplan" "${named[@]}" >out 2>err < <(cat "$file") 9< <(cat "$file")
    expect "the same code: ${named[*]}" test $? == "$code"
    same_words "$kind" >found
    expect "the same answer: ${named[*]}" cmp wanted found
  done
  wait
  rm named-pipe
}
piped piped.json 'models' ''
piped piped.json 'plan --model' "${small[*]}"
cp "$examples/ds_config.json" ds.json
piped piped.json 'check ds.json --gpus 8xA100-80G --model' ''
piped ds.json 'check' '--model 7B --gpus 8xA100-80G'
piped ds.json 'check' '--fix'
cp "$examples/machine.json" machine.json
piped machine.json 'machines' ''
piped machine.json 'plan --model gpt2 --machine' ''
piped made/plan.json 'simulate' '--estimate'
piped made/plan.json 'simulate' '--json'
cp "$examples/topology/dgx-a100.txt" topo.txt
piped topo.txt 'topology' '--gpu A100-80G'
printf '{"schema": 1, "workloads": [{"model": "piped.json", "seq_len": 64, "global_batch": 64}], "machines": [{"hardware": "2x3090-24G"}]}' >ask.json
piped ask.json 'whatif' ''

# What ends nowhere or is none, for a reader of each command.
for path in /dev/zero /dev/urandom /dev/null; do
  refused "$path: expected a file or a pipe, got a device" topology "$path"
  refused "$path: expected a file or a pipe, got a device" plan --model "$path" --gpus 8xH100
  refused "$path: expected a file or a pipe, got a device" plan --model 8B --machine "$path"
done
refused 'work: expected a file, got a directory' simulate "$(mkdir -p work && echo work)"
refused '/dev/stdin: expected a file or a pipe, got a device' topology /dev/stdin
# refused_text PART ARGUMENT...: what a pipe brings.
refused_text() {
  ((total += 1))
  timeout 60 "$zeroplan" "${@:2}" >out 2>err
  if (($? != 2)) || [[ -s out ]] || ! err_has "$1"; then
    printf 'FAILED (wanted "%s"): %s\n  %s\n' "$1" "${*:2}" "$(head -c 300 err)"
    ((failed += 1))
  fi
}
yes 2>/dev/null | refused_text '/dev/stdin: expected at most 16 MiB' topology /dev/stdin
yes 2>/dev/null | refused_text '/dev/stdin: expected at most 16 MiB' plan --model /dev/stdin --gpus 8xH100
head -c 100000 /dev/zero | refused_text '/dev/stdin:1: not valid JSON: a NUL byte' simulate /dev/stdin
head -c 100000 /dev/zero | refused_text '/dev/stdin:1: expected text' topology /dev/stdin

# A named pipe without a writer is given up; three at once, each waits ten seconds.
mkfifo idle
for arguments in '--model idle --gpus 8xH100' '--model 7B --machine idle' 'simulate idle'; do
  read -ra words <<<"$arguments"
  (timeout 60 "$zeroplan" "${words[@]}" >/dev/null 2>"err.$BASHPID"; echo $? >>codes) &
done
wait
expect "a named pipe without a writer: exit 2" test "$(sort -u codes)" == 2
expect "with the reason" bash -c '(($(cat err.* | grep -c "^zeroplan: idle: expected a file, got a named pipe that nobody opened") == 3))'

printf '%d expectations, %d failed\n' "$total" "$failed"
((failed == 0))
