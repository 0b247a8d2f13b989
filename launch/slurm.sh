#!/usr/bin/env bash
# A run on a Slurm cluster of GPU nodes, one process for each GPU.
#
#   bash launch/slurm.sh [--dry-run] submit --name=NAME [--nodes=2] [--gpus=8] [--time=24:00:00]
#     [--partition=...] -- --config=configs/base.py --workdir=...
#
#   submit  queue it; the workdir, and .venv with requirements-gpu.txt, on a file system of all nodes
#   cancel  end it, and take it out of the queue; the run saves first
#
# Slurm tells the run to stop two minutes before its time is up: it saves and exits with 75, and the
# job queues itself again. A run that fails is started again within the job (launch/supervise.py).
# srun waits for every task and ends with the highest status. With --kill-on-bad-exit=1 the first
# task that ends stops the others: a save that takes longer than KillWait (30 s) ends in 137, which
# hides the 75, and a task that is stopped ends with 75, which hides the mistake (2) of another.
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=launch/xla_flags.sh
. launch/xla_flags.sh
OPTIONS=([name]='' [nodes]=2 [gpus]=8 [time]=24:00:00 [partition]='')
parse "$@"
need name

case "$ACTION" in
  submit)
    [ ${#MAIN_FLAGS[@]} -gt 0 ] || fail 'give the flags of the run: -- --config=... --workdir=...'
    partition=()
    if [ -n "${OPTIONS[partition]}" ]; then partition=(--partition="${OPTIONS[partition]}"); fi
    run sbatch --job-name="${OPTIONS[name]}" --nodes="${OPTIONS[nodes]}" \
      --ntasks-per-node="${OPTIONS[gpus]}" --gpus-per-node="${OPTIONS[gpus]}" \
      --time="${OPTIONS[time]}" "${partition[@]}" --requeue --signal=TERM@120 \
      --open-mode=append --output="${OPTIONS[name]}.log" \
      --wrap="trap again=false USR1; srun --kill-on-bad-exit=0 --wait=0 \
env $(quote "$(xla_flags gpu)") .venv/bin/python launch/supervise.py $(quote "${MAIN_FLAGS[@]}"); \
status=\$?; if [ \$status = 75 ] && \${again:-true}; then scontrol requeue \$SLURM_JOB_ID; fi; \
exit \$status" ;;
  cancel)
    run scancel --state=PENDING --name="${OPTIONS[name]}"
    # The job's script hears USR1: the 75 that follows does not queue it again.
    run scancel --batch --signal=USR1 --name="${OPTIONS[name]}"
    run scancel --signal=TERM --name="${OPTIONS[name]}" ;;
  *) fail 'give an action: submit or cancel' ;;
esac
