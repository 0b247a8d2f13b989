# shellcheck shell=bash
# Sourced first by the other scripts: --help prints the comment at the top of the script.
for argument in "$@"; do
  case "$argument" in
    --) break ;; # the other arguments are for another command
    -h | --help)
      sed -n '2,/^[^#]/{/^# shellcheck/d;s/^# \{0,1\}//p;}' "$0"
      exit 0 ;;
  esac
done
