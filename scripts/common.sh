# Sourced by scripts/run and scripts/test: where we are, and what a fresh Debian 12 or Ubuntu 24.04 lacks.
# Everything is said on stderr.

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"

# Exit codes of the spec: 3 for a failure of the machine, 70 for a failure of ours.
kMachineFailed=3
kBug=70

build_packages=(g++ cmake ninja-build nlohmann-json3-dev libfmt-dev libcli11-dev libeigen3-dev libboost-dev libpugixml-dev liburing-dev)
test_packages=(catch2 clang-format-14 python3)

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

# install_missing PACKAGE...: apt-get only when one is missing. What it cannot install (no root, no network, another
# distribution) may be there in another form: CMake decides, and names what it lacks.
install_missing() {
  command -v dpkg-query >/dev/null || return 0
  local package missing=() sudo=()
  for package in "$@"; do
    [[ "$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null)" == *' installed' ]] || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  if ((EUID != 0)); then
    if ! command -v sudo >/dev/null; then
      say "missing, and only root can install them: apt-get install ${missing[*]}"
      return 0
    fi
    sudo=(sudo)
  fi
  say "installing ${missing[*]}"
  { "${sudo[@]}" apt-get update -qq &&
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >&2 ||
    say "apt-get could not install ${missing[*]}"
}

# configure PRESET [OPTION...]: afresh when the build folder came from another place (a copied tree).
configure() {
  local cache="$root/build/$1/CMakeCache.txt" fresh=()
  if [[ -f "$cache" ]] && ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$root" "$cache"; then fresh=(--fresh); fi
  (cd -- "$root" && cmake --preset "$@" "${fresh[@]}")
}
