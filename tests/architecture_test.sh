#!/usr/bin/env bash
# architecture_test.sh ROOT: fails on an #include that points upward (style: arrows only downward), and on a library
# header outside the folder that owns it. Prints file:line of each.
set -uo pipefail
cd -- "${1:?the root of the sources}" || exit 2
violations=0

# forbid WHY PATTERN FILE-GLOB...: the includes that match PATTERN in the files.
forbid() {
  local why="$1" pattern="$2" found
  shift 2
  local names=() folder="$1"
  shift
  for name in "$@"; do names+=(--include="$name"); done
  [[ -d "$folder" ]] || return 0
  found="$(grep -rnE "${names[@]}" "^[[:space:]]*#[[:space:]]*include[[:space:]]*$pattern" "$folder")" || return 0
  printf '%s\n' "$found" | sed "s|\$|   <- $why|"
  violations=1
}
sources=('*.h' '*.cpp' '*.cu' '*.cuh')

# Ours: what each folder may not see. `runtime` never sees `sim`: a measurement cannot depend on a prediction.
forbid "models may include only models" '"(sim|planner|runtime|cli|tests)/' models "${sources[@]}"
forbid "sim may include only models and sim" '"(planner|runtime|cli|tests)/' sim "${sources[@]}"
forbid "planner may include only models, sim and planner" '"(runtime|cli|tests)/' planner "${sources[@]}"
forbid "runtime may include only models and runtime" '"(sim|planner|cli|tests)/' runtime "${sources[@]}"
forbid "cli may not include tests" '"tests/' cli "${sources[@]}"

# A name without its folder, or with dots, would go round the rules above.
for folder in models sim planner runtime cli; do
  forbid "write the folder: \"$folder/name.h\"" '"([^/"]*"|[^"]*\.\./)' "$folder" "${sources[@]}"
done

# Libraries: each in its folder, and in no header of ours.
for folder in models planner runtime cli; do
  forbid "Boost belongs to sim" '<boost/' "$folder" "${sources[@]}"
done
for folder in models planner cli; do
  forbid "Eigen belongs to sim and runtime" '<Eigen/' "$folder" "${sources[@]}"
done
for folder in models sim planner runtime; do
  forbid "CLI11 belongs to cli" '<CLI/' "$folder" "${sources[@]}"
  forbid "no header of ours shows this library" '<(boost|Eigen|nlohmann|CLI)/' "$folder" '*.h'
done
for folder in models sim planner cli; do
  forbid "CUDA belongs to runtime" '<(cuda[^/>]*|nccl[^/>]*)>' "$folder" "${sources[@]}"
done

exit "$violations"
