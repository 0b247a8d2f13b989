# shellcheck shell=bash
# Sourced first by the other scripts: --help prints the comment at their head.
for argument in "$@"; do
  case "$argument" in
    --) break ;; # the rest is for another command
    -h | --help)
      sed -n '2,/^[^#]/{/^# shellcheck/d;s/^# \{0,1\}//p}' "$0"
      exit 0 ;;
  esac
done
