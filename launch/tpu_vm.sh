#!/usr/bin/env bash
# Runs on a Cloud TPU VM or a slice of several hosts, and resumes after a preemption.
#
#   bash launch/tpu_vm.sh [--dry-run] ACTION --name=NAME --zone=ZONE [OPTIONS] [-- FLAGS OF main]
#
#   create   rents the machines: --type=v5litepod-16 [--spot | --reserved] [--queued]; with
#            --queued it waits in the queue. [--network=NAME] [--subnetwork=NAME] [--internal-ips]
#            [--service-account=EMAIL]
#            [--data-disk=source=projects/PROJECT/zones/ZONE/disks/NAME,mode=read-only]
#   install  copies this checkout to every host and installs it there
#   run      starts the run on every host, and restarts it until it is done
#            (launch/supervise.py): -- --config=configs/base.py --workdir=...
#   log      follows the log of the first host
#   resume   after a preemption, rents the machines again, installs, and resumes the run from its
#            newest checkpoint
#   delete   returns the machines
#
# Needs gcloud, logged in, with a default project or --project=NAME. gcloud connects to all hosts of
# a slice at once, with a key that an ssh-agent holds. Give --internal-ips to every action or none:
# this script then runs on a machine of the same network, and the hosts reach the package index
# through Cloud NAT. --dry-run prints the commands and runs none.
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=launch/xla_flags.sh
. launch/xla_flags.sh
OPTIONS=([name]='' [zone]='' [project]='' [type]=v5litepod-16 [spot]=false [reserved]=false
         [queued]=false [network]='' [subnetwork]='' [internal-ips]=false [service-account]=''
         [data-disk]='')
parse "$@"
need name zone

name="${OPTIONS[name]}" type="${OPTIONS[type]}"
generation="$(generation "$type")"
declare -A runtimes=([v4]=tpu-ubuntu2204-base [v5e]=v2-alpha-tpuv5-lite [v5p]=v2-alpha-tpuv5
                     [v6e]=v2-alpha-tpuv6e)
runtime="${runtimes[$generation]:-}"
[ -n "$runtime" ] || fail "the Cloud TPU API does not serve $generation: rent a node pool on GKE \
and use launch/gke.sh --topology=$generation:2x2x1"
disk="${OPTIONS[data-disk]}"
[[ -z "$disk" || ",$disk" == *,source=projects/* ]] ||
  fail "--data-disk=$disk names no disk: write \
source=projects/PROJECT/zones/ZONE/disks/NAME,mode=read-only"
tpu=(gcloud compute tpus tpu-vm)
queue=(gcloud compute tpus queued-resources)
zone=(--zone="${OPTIONS[zone]}")
if [ -n "${OPTIONS[project]}" ]; then zone+=(--project="${OPTIONS[project]}"); fi
machine=() address=()
for key in spot reserved internal-ips; do
  if [ "${OPTIONS[$key]}" = true ]; then machine+=("--$key"); fi
done
for key in network subnetwork service-account data-disk; do
  if [ -n "${OPTIONS[$key]}" ]; then machine+=("--$key=${OPTIONS[$key]}"); fi
done
if [ "${OPTIONS[internal-ips]}" = true ]; then address=(--internal-ip); fi

check_agent() {
  local key=~/.ssh/google_compute_engine print
  case "$type" in *-[148]) return ;; esac  # one host
  if $DRY_RUN; then return; fi
  print="$(ssh-keygen -lf "$key" 2> /dev/null | cut -d ' ' -f 2)" || print='no key'
  ssh-add -l 2> /dev/null | grep -qF "$print" || fail "no ssh-agent holds $key, and gcloud stalls \
without it where there are several hosts: eval \"\$(ssh-agent)\" && ssh-add $key \
(ssh-keygen -t rsa -f $key creates the key)"
}

on_all() { # command; a shell on every host runs it
  run "${tpu[@]}" ssh "$name" "${zone[@]}" --worker=all "${address[@]}" --command="$1"
}

wait_in_queue() {
  local state
  while true; do
    state="$("${queue[@]}" describe "$name" "${zone[@]}" --format='value(state.state)')"
    case "$state" in
      ACTIVE) return ;;
      FAILED | SUSPENDED | SUSPENDING) fail "the queued resource $name is $state: delete it and create it again" ;;
    esac
    sleep 30
  done
}

create() {
  if [ "${OPTIONS[queued]}" = true ]; then
    run "${queue[@]}" create "$name" --node-id="$name" "${zone[@]}" --accelerator-type="$type" \
      --runtime-version="$runtime" "${machine[@]}"
    if ! $DRY_RUN; then wait_in_queue; fi
  else
    run "${tpu[@]}" create "$name" "${zone[@]}" --accelerator-type="$type" --version="$runtime" \
      "${machine[@]}"
  fi
}

install() {
  if [ -n "$(git status --porcelain)" ]; then
    echo 'bert_jax: uncommitted changes are not copied' >&2
  fi
  run git archive --format=tar.gz --prefix=bert_jax/ --output=/tmp/bert_jax.tar.gz HEAD
  run "${tpu[@]}" scp /tmp/bert_jax.tar.gz "$name:" "${zone[@]}" --worker=all \
    "${address[@]}"
  on_all 'tar xzf bert_jax.tar.gz && cd bert_jax && . launch/venv.sh requirements-tpu.txt'
}

start() {
  [ ${#MAIN_FLAGS[@]} -gt 0 ] || fail 'give the flags of the run: -- --config=... --workdir=...'
  # The run holds a lock on each host, so a second run ends at once. The braces detach the run, so
  # that the ssh connection can close.
  on_all "cd bert_jax && exec 9> supervise.lock \
&& { flock -n 9 || { echo 'bert_jax: a run is in progress here' >&2; exit 2; }; } \
&& { env $(quote "$(xla_flags "$generation")") nohup .venv/bin/python launch/supervise.py \
$(quote "${MAIN_FLAGS[@]}") > run.log 2>&1 < /dev/null & }"
}

delete() {
  if [ "${OPTIONS[queued]}" = true ]; then
    run "${queue[@]}" delete "$name" "${zone[@]}" --force --quiet
  else
    run "${tpu[@]}" delete "$name" "${zone[@]}" --quiet
  fi
}

case "$ACTION" in install | run | resume) check_agent ;; esac
case "$ACTION" in
  create) create ;;
  install) install ;;
  run) start ;;
  log)
    run "${tpu[@]}" ssh "$name" "${zone[@]}" --worker=0 "${address[@]}" \
      --command='tail -n 100 -f bert_jax/run.log' ;;
  resume)
    state=PREEMPTED
    if ! $DRY_RUN; then
      # Only a missing machine may be created again: a network error says nothing about it.
      state="$("${tpu[@]}" describe "$name" "${zone[@]}" --format='value(state)' 2>&1)" ||
        case "$state" in
          *NOT_FOUND* | *"not found"*) state=GONE ;;
          *) fail "$name cannot be described: $state" ;;
        esac
    fi
    case "$state" in
      READY) ;;
      PREEMPTED | TERMINATED | GONE)
        # A queued resource still exists after its machines are gone.
        if [ "$state" != GONE ] || [ "${OPTIONS[queued]}" = true ]; then delete; fi
        create
        install ;;
      *) fail "$name is $state: wait until it is READY, or delete it" ;;
    esac
    start ;;
  delete) delete ;;
  *) fail "give an action: create, install, run, log, resume or delete" ;;
esac
