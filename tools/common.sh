# Sourced by the other tools: installs what is missing, configures and builds ./build.
# Says what it installs, asks nothing. Runs as root or through sudo. Where everything is there, no
# package manager is called and a second run only asks ninja whether something changed.
set -euo pipefail
quire_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
quire_build=$quire_root/build

quire_install() {
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || {
      echo "quire: missing $*; install them as root, or install sudo" >&2
      exit 1
    }
    as_root=(sudo)
  fi
  command -v apt-get >/dev/null || {
    echo "quire: missing $*; there is no apt-get here, install them by other means" >&2
    exit 1
  }
  echo "quire: installing $*"
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
    --no-install-recommends "$@" >/dev/null
}

# Installs packages by the names of their programs.
quire_need() {
  local program missing=()
  for program in "$@"; do
    command -v "$program" >/dev/null || missing+=("$program")
  done
  [ ${#missing[@]} -eq 0 ] || quire_install "${missing[@]}"
}

quire_configure() {
  cmake -S "$quire_root" -B "$quire_build" -G Ninja >"$quire_build/configure.log" 2>&1
}

quire_prepare() {
  local tools=()
  command -v cmake >/dev/null || tools+=(cmake)
  command -v ninja >/dev/null || tools+=(ninja-build)
  command -v g++ >/dev/null || tools+=(g++)
  [ ${#tools[@]} -eq 0 ] || quire_install "${tools[@]}"

  mkdir -p "$quire_build"
  if [ ! -f "$quire_build/build.ninja" ]; then
    if ! quire_configure; then
      local missing=$quire_build/missing-packages.txt
      if [ -s "$missing" ]; then
        # shellcheck disable=SC2046  # one word per package is wanted
        quire_install $(cat "$missing")
      fi
      quire_configure || {
        cat "$quire_build/configure.log" >&2
        exit 1
      }
    fi
    grep '^-- quire:' "$quire_build/configure.log" || true
  fi
}

quire_build_targets() {
  # ninja prints one line of progress; its errors come last and whole.
  ninja -C "$quire_build" "$@"
}
