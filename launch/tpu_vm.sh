#!/usr/bin/env bash
# A Cloud TPU VM or a slice of several hosts, from nothing to a run that goes on after preemption.
#
#   bash launch/tpu_vm.sh [--dry-run] ACTION --name=NAME --zone=ZONE [OPTIONS] [-- FLAGS OF main]
#
#   create   rent it: --type=v5litepod-16 [--spot] [--queued]; with --queued it waits in the queue
#   install  copy this checkout to every host and install it there
#   run      start the run on every host, again and again until it is done
#            (launch/supervise.py): -- --config=configs/base.py --workdir=...
#   log      follow the log of the first host
#   resume   if it was preempted: rent it again, install, run; the run goes on where it was saved
#   delete   give it back
#
# Needs gcloud, logged in, with a project. --dry-run prints the commands and runs none.
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=launch/xla_flags.sh
. launch/xla_flags.sh
OPTIONS=([name]='' [zone]='' [type]=v5litepod-16 [spot]=false [queued]=false)
parse "$@"
need name zone

name="${OPTIONS[name]}" zone="--zone=${OPTIONS[zone]}" type="${OPTIONS[type]}"
case "$type" in
  v4-*) generation=v4 runtime=tpu-ubuntu2204-base ;;
  v5litepod-*) generation=v5e runtime=v2-alpha-tpuv5-lite ;;
  v5p-*) generation=v5p runtime=v2-alpha-tpuv5 ;;
  v6e-*) generation=v6e runtime=v2-alpha-tpuv6e ;;
  tpu7x-*) generation=tpu7x runtime=v2-alpha-tpu7-ubuntu2404 ;;
  *) fail "unknown --type=$type: there are v4-N, v5litepod-N, v5p-N, v6e-N, tpu7x-N" ;;
esac
tpu=(gcloud compute tpus tpu-vm)
queue=(gcloud compute tpus queued-resources)
spot=()
if [ "${OPTIONS[spot]}" = true ]; then spot=(--spot); fi

on_all() { # command: run by a shell on every host
  run "${tpu[@]}" ssh "$name" "$zone" --worker=all --command="$1"
}

wait_in_queue() {
  local state
  while true; do
    state="$("${queue[@]}" describe "$name" "$zone" --format='value(state.state)')"
    case "$state" in
      ACTIVE) return ;;
      FAILED | SUSPENDED | SUSPENDING) fail "the queued resource $name is $state: delete it and create it again" ;;
    esac
    sleep 30
  done
}

create() {
  if [ "${OPTIONS[queued]}" = true ]; then
    run "${queue[@]}" create "$name" --node-id="$name" "$zone" --accelerator-type="$type" \
      --runtime-version="$runtime" "${spot[@]}"
    if ! $DRY_RUN; then wait_in_queue; fi
  else
    run "${tpu[@]}" create "$name" "$zone" --accelerator-type="$type" --version="$runtime" \
      "${spot[@]}"
  fi
}

install() {
  if [ -n "$(git status --porcelain)" ]; then
    echo 'bert_jax: what is not committed is not copied' >&2
  fi
  run git archive --format=tar.gz --prefix=bert_jax/ --output=/tmp/bert_jax.tar.gz HEAD
  run "${tpu[@]}" scp /tmp/bert_jax.tar.gz "$name:" "$zone" --worker=all
  on_all 'tar xzf bert_jax.tar.gz && cd bert_jax && . launch/venv.sh requirements-tpu.txt'
}

start() {
  [ ${#MAIN_FLAGS[@]} -gt 0 ] || fail 'give the flags of the run: -- --config=... --workdir=...'
  # In braces, so that nothing that waits for it holds the connection.
  on_all "cd bert_jax && { env $(quote "$(xla_flags "$generation")") nohup .venv/bin/python \
launch/supervise.py $(quote "${MAIN_FLAGS[@]}") > run.log 2>&1 < /dev/null & }"
}

delete() {
  if [ "${OPTIONS[queued]}" = true ]; then
    run "${queue[@]}" delete "$name" "$zone" --force --quiet
  else
    run "${tpu[@]}" delete "$name" "$zone" --quiet
  fi
}

case "$ACTION" in
  create) create ;;
  install) install ;;
  run) start ;;
  log) run "${tpu[@]}" ssh "$name" "$zone" --worker=0 --command='tail -n 100 -f bert_jax/run.log' ;;
  resume)
    state=PREEMPTED
    if ! $DRY_RUN; then
      state="$("${tpu[@]}" describe "$name" "$zone" --format='value(state)' 2>/dev/null || echo GONE)"
    fi
    if [ "$state" != READY ]; then
      # A queued resource stays when its machines have gone.
      if [ "$state" != GONE ] || [ "${OPTIONS[queued]}" = true ]; then delete; fi
      create
      install
    fi
    start ;;
  delete) delete ;;
  *) fail "give an action: create, install, run, log, resume or delete" ;;
esac
