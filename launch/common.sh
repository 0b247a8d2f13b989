# shellcheck shell=bash
# Sourced by the scripts that rent machines: commands are run, or with --dry-run printed as they
# would be typed.
# shellcheck source=launch/help.sh
. "$(dirname "${BASH_SOURCE[0]}")/help.sh"
set -euo pipefail
if [ "${BASH_VERSINFO[0]}" -lt 4 ]; then
  echo "bert_jax: bash $BASH_VERSION is too old for this script: install bash 4 or newer" >&2
  exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
DRY_RUN=false

fail() { # message: a mistake of the user
  echo "bert_jax: $1" >&2
  exit 2
}

run() { # command and arguments
  if $DRY_RUN; then
    local quoted
    printf -v quoted ' %q' "$@"
    echo "${quoted# }"
  else
    "$@"
  fi
}

quote() { # words: as a shell reads them back
  local quoted
  printf -v quoted ' %q' "$@"
  echo "${quoted# }"
}

# Reads [--dry-run] ACTION --key=value ... [-- FLAGS OF main] into ACTION, the variables that the
# script has declared in OPTIONS (key -> value), and MAIN_FLAGS.
declare -A OPTIONS=()
MAIN_FLAGS=()
ACTION=''
# shellcheck disable=SC2034  # MAIN_FLAGS is for the script that sources this one
parse() {
  while [ $# -gt 0 ]; do
    case "$1" in
      --) shift; MAIN_FLAGS=("$@"); return ;;
      --dry-run) DRY_RUN=true ;;
      --*)
        local key="${1#--}" value=true
        if [[ "$key" == *=* ]]; then value="${key#*=}"; key="${key%%=*}"; fi
        [ -n "${OPTIONS[$key]+known}" ] || fail "unknown option --$key: there are --dry-run ${!OPTIONS[*]}"
        OPTIONS[$key]="$value" ;;
      *) [ -z "$ACTION" ] || fail "unexpected argument $1"; ACTION="$1" ;;
    esac
    shift
  done
}

need() { # keys that have to be given
  local key
  for key in "$@"; do
    [ -n "${OPTIONS[$key]}" ] || fail "give --$key"
  done
}

generation() { # accelerator type, as in v5litepod-16
  case "$1" in
    v5litepod-*) echo v5e ;;
    v4-* | v5p-* | v6e-* | tpu7x-*) echo "${1%%-*}" ;;
    *) fail "unknown --type=$1: there are v4-N, v5litepod-N, v5p-N, v6e-N, tpu7x-N" ;;
  esac
}
