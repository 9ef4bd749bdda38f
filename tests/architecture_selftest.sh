#!/usr/bin/env bash
# Each forbidden #include, alone in a tree of its own, must make architecture_test.sh fail; a legal tree must pass.
set -euo pipefail
guard="$(dirname -- "${BASH_SOURCE[0]}")/architecture_test.sh"
tree="$(mktemp -d)"
trap 'rm -rf -- "$tree"' EXIT
failures=0

# expect pass|fail FILE INCLUDE
expect() {
  mkdir -p -- "$tree/$(dirname -- "$2")"
  printf '#pragma once\n#include %s\n' "$3" >"$tree/$2"
  local got=pass
  bash "$guard" "$tree" >/dev/null || got=fail
  if [[ "$got" != "$1" ]]; then
    printf '%s with #include %s: expected %s, got %s\n' "$2" "$3" "$1" "$got"
    failures=1
  fi
  rm -- "$tree/$2"
}

expect pass models/a.h '"models/units.h"'
expect pass models/a.cpp '<nlohmann/json.hpp>'
expect pass sim/a.cpp '<boost/graph/adjacency_list.hpp>'
expect pass sim/a.cpp '"models/units.h"'
expect pass planner/a.h '"sim/topology.h"'
expect pass runtime/a.cpp '<Eigen/Dense>'
expect pass cli/a.cpp '"planner/search.h"'
expect pass cli/a.cpp '<CLI/CLI.hpp>'
expect pass runtime/cuda/a.h '<cuda_runtime.h>'

expect fail models/a.h '"sim/topology.h"'
expect fail models/deep/er/a.cpp '"planner/search.h"'
expect fail sim/a.cpp '"planner/search.h"'
expect fail sim/a.cpp '"cli/a.h"'
expect fail planner/a.cpp '"runtime/executor.h"'
expect fail runtime/a.cpp '"sim/topology.h"'
expect fail runtime/cuda/a.cu '"planner/search.h"'
expect fail cli/a.cpp '"tests/catch.h"'
expect fail models/a.cpp '"units.h"'
expect fail models/a.cpp '"models/../sim/topology.h"'
expect fail planner/a.cpp '<boost/graph/adjacency_list.hpp>'
expect fail models/a.cpp '<Eigen/Dense>'
expect fail sim/a.h '<Eigen/Dense>'
expect fail models/a.h '<nlohmann/json.hpp>'
expect fail planner/a.cpp '<CLI/CLI.hpp>'
expect fail sim/a.cpp '<cuda_runtime.h>'
exit "$failures"
