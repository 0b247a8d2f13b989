# shellcheck shell=bash
# Sourced by the scripts for TPU VMs, GKE and Slurm. It runs commands, or with --dry-run prints them as
# a user would type them.
# shellcheck source=launch/help.sh
. "$(dirname "${BASH_SOURCE[0]}")/help.sh"
set -euo pipefail
# With `set -u`, an empty array is an unbound variable before 4.4.
if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  echo "bert_jax: bash $BASH_VERSION is too old for this script: install bash 4.4 or newer" >&2
  exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
DRY_RUN=false

fail() { # message of a user error
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

quote() { # words; prints them quoted for a shell
  local quoted
  printf -v quoted ' %q' "$@"
  echo "${quoted# }"
}

# Parses [--dry-run] ACTION --key=value ... [-- FLAGS OF main] into ACTION, MAIN_FLAGS, and the
# values of the keys that the script has declared in OPTIONS.
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
        [ -n "${OPTIONS[$key]+known}" ] || fail "unknown option --$key: use --dry-run ${!OPTIONS[*]}"
        # A script treats every other value of such an option as false: `yes` would be ignored.
        case "${OPTIONS[$key]}:$value" in
          *:true | *:false) ;;
          true:* | false:*) fail "--$key=$value: give true or false" ;;
        esac
        OPTIONS[$key]="$value" ;;
      *) [ -z "$ACTION" ] || fail "unexpected argument $1"; ACTION="$1" ;;
    esac
    shift
  done
}

need() { # required keys
  local key
  for key in "$@"; do
    [ -n "${OPTIONS[$key]}" ] || fail "give --$key"
  done
}

generation() { # accelerator type, such as v5litepod-16
  case "$1" in
    v5litepod-*) echo v5e ;;
    v4-* | v5p-* | v6e-* | tpu7x-*) echo "${1%%-*}" ;;
    *) fail "unknown --type=$1: use v4-N, v5litepod-N, v5p-N, v6e-N, tpu7x-N" ;;
  esac
}
