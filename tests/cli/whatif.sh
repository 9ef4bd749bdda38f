#!/usr/bin/env bash
# whatif.sh ZEROPLAN EXAMPLES: budgets, deadlines, files of what-ifs and their folders, from outside.
set -uo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/expect.sh"
zeroplan="$(realpath -- "${1:?the program}")"
examples="$(realpath -- "${2:?the folder of examples}")"
here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
work="$(mktemp -d)"
trap 'rm -rf -- "$work"' EXIT
cd -- "$work" || exit 2

small=(--model gpt2 --seq-len 1024 --global-batch 64 --recompute none)
ask() { run whatif "${small[@]}" --tokens 100B "$@"; }

# Within limits: what is taken, and what it says of the rest.
expect "both are kept" ask --hardware 4xA100-80G@12USD,2x3090-24G@0.8USD --budget 5kUSD --deadline 20days
expect "a machine is taken" out_has 'Take'
expect "with what is left" out_has 'to spare'
expect "each number of nodes is predicted" out_has 'by number of nodes (each predicted)'
expect "which numbers is said" out_has 'each of them predicted, none scaled from another'
expect "the same question as JSON" ask --hardware 4xA100-80G@12USD,2x3090-24G@0.8USD,2x2x3090-24G --budget 5kUSD --deadline 20days --json
cp out kept.json
expect "cost = hours x nodes x price, no price no cost" python3 "$here/check_whatif.py" laws kept.json
expect "no null" bash -c '! grep -qE "null|nan|inf" kept.json'
expect "the fastest instead" ask --hardware 4xA100-80G@12USD,2x3090-24G@0.8USD --budget 5kUSD --objective time --json
expect "is what is preferred" out_has '"prefer": "fastest"'

# Not within limits: exit 1, the nearest, and changes that do.
for limits in '--budget 100USD --deadline 9days' '--deadline 5h' '--budget 60USD' '--budget 50USD --deadline 1h'; do
  read -ra words <<<"$limits"
  question=(whatif "${small[@]}" --tokens 100B --hardware '1x4xA100-80G@12USD,2x3090-24G@0.8USD')
  expect "$limits: exit 1" exits 1 "${question[@]}" "${words[@]}" --json
  cp out missed.json
  expect "$limits: it is still an answer" python3 "$here/check_whatif.py" laws missed.json
  while IFS= read -r change; do
    ((total += 1))
    python3 "$here/check_whatif.py" apply "$change" "${question[@]}" "${words[@]}" >command
    mapfile -t arguments <command
    if ! timeout 600 "$zeroplan" "${arguments[@]}" >again 2>err </dev/null; then
      echo "FAILED: $limits: $change does not do"
      ((failed += 1))
    fi
  done < <(python3 "$here/check_whatif.py" changes missed.json)
done
expect "as text" exits 1 "${question[@]}" --budget 100USD --deadline 9days
expect "says so" out_has 'Not within the limits'
expect "and what would do" out_has 'the cheapest change first'

# What would take a century is no change that a flag can ask for.
expect "no flag that nobody can give" exits 1 whatif --model 70B --hardware 1x4xA100-80G@10USD --tokens 1000T --deadline 30days --budget 1kUSD --json
expect "is named" bash -c '! grep -qE "\"flag\"" out'

# Units and flags that lack each other.
for text in 5000 '' USD -5USD 0USD 5000EUR 5000usd nanUSD 1e400USD 5000USD/h '5 000USD' 2e12USD; do
  refused '--budget' whatif "${small[@]}" --tokens 1B --hardware 8xH100 --budget "$text"
done
refused 'expected US dollars such as 50000USD' whatif "${small[@]}" --tokens 1B --hardware 8xH100 --budget 5000
for text in 30 '' days -1days 0days 30dayz 30months 1e9days nandays '30  days' 30daysdays; do
  refused '--deadline' whatif "${small[@]}" --tokens 1B --hardware 8xH100 --deadline "$text"
done
refused 'expected a time such as 30days' whatif "${small[@]}" --tokens 1B --hardware 8xH100 --deadline 30
for text in 30d '30 days' 1day 36h '2 weeks' 1week 12hours; do
  expect "--deadline $text" ask --hardware 8xH100 --deadline "$text"
done
refused '--budget: needs --tokens' whatif "${small[@]}" --hardware 8xH100 --budget 5000USD
refused '--deadline: needs --tokens' whatif "${small[@]}" --hardware 8xH100 --deadline 3days
refused 'no price is known' whatif "${small[@]}" --tokens 1B --hardware HGX-H100-8 --budget 5000USD
# A refusal names the flag and the machine of the list that is wrong, and nothing that was not typed.
refused '--hardware 0x8xH100: nodes: expected' whatif "${small[@]}" --hardware 8xH100,0x8xH100
refused '--hardware 99999999xp4d.24xlarge: nodes: expected' whatif "${small[@]}" --hardware 99999999xp4d.24xlarge
refused '--hardware 8xFoo: unknown GPU "Foo"' whatif "${small[@]}" --hardware 8xH100,8xFoo
refused '--hardware Foo: expected NxGPU, a catalog node or a machine.json' whatif "${small[@]}" --hardware 8xH100,Foo
refused '--hardware 8x: expected NxGPU such as' whatif "${small[@]}" --hardware 8x@3USD
refused '--hardware 2x0xH100: the count' whatif "${small[@]}" --hardware 2x0xH100
refused '--hardware 8xA100-33G: "A100-33G": no such GPU has 33 GB' whatif "${small[@]}" --hardware 8xA100-33G
refused '--hardware 16xH100: 16xH100-SXM5-80GB is more than one node holds (at most 8): use 2x8xH100-SXM5-80GB' whatif "${small[@]}" --hardware 16xH100
refused 'use 6x8xH100-SXM5-80GB' whatif "${small[@]}" --hardware 3x16xH100
expect "what it says to use is taken" ask --hardware 2x8xH100-SXM5-80GB --json
expect "nodes of a catalog node" ask --hardware 2xp4d.24xlarge --json
expect "are taken" out_has '"nodes": 2'

# The file.
expect "the example" exits 0 whatif "$examples/whatif.json" --json
cp out example.json
expect "has its laws" python3 "$here/check_whatif.py" laws example.json
expect "and its on-premise price" python3 "$here/check_whatif.py" owned example.json "$examples/whatif.json"
expect "the same bytes again" bash -c "'$zeroplan' whatif '$examples/whatif.json' --json 2>/dev/null | cmp - example.json"
expect "a flag replaces what it says" run whatif "$examples/whatif.json" --tokens 1B
expect "with a note and its line" err_has "whatif.json:9: /workloads/0/tokens"
refused 'states its workloads' whatif "$examples/whatif.json" --model 8B
refused 'the machines of' whatif "$examples/whatif.json" --hardware 8xH100
# edited PART PYTHON: the example with `f` changed is refused with PART.
edited() {
  python3 - "$examples/whatif.json" "$2" <<'PY' || { echo "FAILED: cannot make $2"; ((failed += 1)); }
import json, sys
f = json.load(open(sys.argv[1]))
w, m = f["workloads"], f["machines"]
exec(sys.argv[2])
json.dump(f, open("edited.json", "w"), indent=1)
PY
  refused "$1" whatif edited.json
}
edited 'schema' 'f["schema"] = 2'
edited 'edited.json:50: unknown key "deadlin", did you mean deadline' 'f["deadlin"] = "3 days"'
edited '/budget: expected US dollars' 'f["budget"] = "60000"'
edited '/budget: expected' 'f["budget"] = 60000'
edited '/workloads/1/deadline: expected a time' 'w[1]["deadline"] = "14"'
edited '/workloads/0/seq_len' 'w[0]["seq_len"] = "8192"'
edited '/workloads/0/seq_len: expected' 'w[0]["seq_len"] = 0'
edited '/workloads/0/tokens: expected a number of tokens' 'w[0]["tokens"] = "soon"'
edited '/workloads/0/model' 'w[0]["model"] = "8C"'
edited 'model' 'del w[0]["model"]'
edited 'a second workload named' 'w[1]["name"] = w[0]["name"]'
edited '/workloads: expected 1 to' 'f["workloads"] = []'
edited 'expected "workloads", "machines" or both' 'del f["workloads"], f["machines"]'
edited 'json:24: /machines/0/hardware: 8xH1000: unknown GPU' 'm[0]["hardware"] = "8xH1000"'
edited '/machines/0/hardware: 16xH100: 16xH100-SXM5-80GB is more than one node holds (at most 8): use 2x8x' 'm[0]["hardware"] = "16xH100"'
edited '/machines/0/nvme: expected DRIVESxSIZE' 'm[0]["nvme"] = "some"'
edited 'a price; "price" is a key' 'm[0]["hardware"] = "8xH100@3USD"'
edited '/machines/0/name: expected a name' 'm[0]["name"] = "red \x1b[31m"'
edited '/machines/0/name: expected a name' 'm[0]["name"] = ""'
edited 'at most 1,000,000 USD an hour' 'm[2]["on_premise"]["lifetime"] = "1e-300 years"'
edited 'a second machine named' 'm[3] = dict(m[0])'
edited '/machines/1/nodes' 'm[1]["nodes"] = 0'
edited '/machines/1/nodes: expected 4' 'm[1]["hardware"] = "4x8xH200"'
edited '/machines/1/price: expected US dollars of a node and hour' 'm[1]["price"] = "33.5 USD"'
edited '/machines/1/on_premise: expected "price" or "on_premise", got both' 'm[1]["on_premise"] = m[2]["on_premise"]'
edited 'has no "price" beside it' 'del m[1]["price"]'
edited 'utilisation' 'del m[2]["on_premise"]["utilisation"]'
edited '/machines/2/on_premise/utilisation: expected a part' 'm[2]["on_premise"]["utilisation"] = "120 %"'
edited '/machines/2/on_premise/power: expected what a node draws' 'm[2]["on_premise"]["power"] = "6500"'
edited '/machines/2/on_premise/lifetime: expected a time' 'm[2]["on_premise"]["lifetime"] = "5"'
edited '/machines/2/on_premise/capital: expected what a node cost' 'm[2]["on_premise"]["capital"] = "199000 EUR"'
edited '/machines/2/on_premise/electricity: expected a price' 'm[2]["on_premise"]["electricity"] = "0.15 USD"'
edited 'no capital and no electricity' 'm[2]["on_premise"].update(capital="0 USD", power="0 W")'
edited '/machines/0/host_memory' 'm[0]["host_memory"] = "12"'
edited '/machines/0/nvme' 'm[0]["nvme"] = "many"'
refused 'nowhere.json' whatif nowhere.json
expect "broken files never crash it" python3 "$here/check_whatif.py" fuzz "$zeroplan" "$examples/whatif.json"

# A machine.json beside the file, from any folder.
mkdir -p deep/er
"$zeroplan" machines p4de.24xlarge --json >deep/mine.json
printf '{"schema": 1, "machines": [{"hardware": "mine.json", "price": "9 USD/h"}]}' >deep/ask.json
expect "paths are relative to the file" run whatif deep/ask.json --model gpt2 --tokens 1B --deadline 30days --json
expect "with the price of the file" out_has '"usd_per_hour": 9.0'
printf '{"schema": 1, "machines": [{"hardware": "mine.json", "nodes": 3}]}' >deep/three.json
expect "nodes of a machine file" run whatif deep/three.json --model gpt2 --tokens 1B --deadline 30days --json
expect "are those that the file of what-ifs says" out_has '"nodes": 3'

# The folder.
expect "--out" exits 0 whatif "$examples/whatif.json" --out answer/today
for file in whatif.json whatif.csv '8B--continued/8xH100/plan.json' '1B-from-scratch/our-DGX-A100/plan.json'; do
  expect "$file" test -s "answer/today/$file"
done
expect "one line a row and the header" bash -c '(($(wc -l <answer/today/whatif.csv) == 9))'
expect "plans are what simulate plays" exits 0 simulate 'answer/today/8B--continued/8xH100/plan.json' --json
cp out played.json
expect "with the step of the row" python3 "$here/check_whatif.py" step answer/today/whatif.json played.json
expect "the CSV has the figures of the JSON" python3 "$here/check_whatif.py" csv answer/today/whatif.json answer/today/whatif.csv
expect "no temporary file is left" bash -c '[[ -z "$(find answer -name "*.tmp")" ]]'
find answer -type f -exec cksum {} + | sort >before
refused 'is there already' whatif "$examples/whatif.json" --out answer/today --tokens 1B
find answer -type f -exec cksum {} + | sort >after
expect "and nothing was touched" cmp -s before after
expect "--force" exits 0 whatif "$examples/whatif.json" --out answer/today --force
mkdir -p half/8xH100/plan.json
refused 'expected a regular file' whatif "${small[@]}" --hardware 8xH100 --out half --force
expect "leaves nothing new" bash -c '[[ "$(find half -type f | wc -l)" == 0 ]]'
: >file
refused 'file' whatif "${small[@]}" --hardware 8xH100 --out file/below
expect "what misses is written too" exits 1 whatif "${small[@]}" --tokens 100B --hardware 8xH100 --deadline 1h --out missed
expect "with its plan" test -s missed/8xH100/plan.json
expect "names that are no folders" exits 0 whatif "${small[@]}" --hardware 8xH100@3USD,deep/mine.json --out odd
expect "become ones" test -s odd/deep-mine.json/plan.json -a -s odd/8xH100-3USD/plan.json

printf '%d expectations, %d failed\n' "$total" "$failed"
((failed == 0))
