#!/usr/bin/env bash
# Runs on a Slurm cluster of GPU nodes, with one process per GPU.
#
#   bash launch/slurm.sh [--dry-run] submit --name=NAME [--nodes=2] [--gpus=8] [--time=24:00:00]
#     [--partition=...] -- --config=configs/base.py --workdir=...
#
#   submit  queues the job; the workdir, and .venv with requirements-gpu.txt, must be on a file
#           system that all nodes share
#   cancel  ends the job and removes it from the queue; the run saves first
#
# Slurm sends SIGTERM two minutes before the time limit. The run saves and exits with 75, and the
# job queues itself again. If a run fails, launch/supervise.py restarts it within the job.
# srun waits for every task and returns the highest status. --kill-on-bad-exit=1 is wrong here: the
# first task that ends would stop the others. A save that takes longer than KillWait (30 s) would
# end with 137, which hides the 75, and a stopped task would end with 75, which hides the mistake
# (2) of another task.
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
    # USR1 tells the job's script not to queue the job again after the 75 that follows.
    run scancel --batch --signal=USR1 --name="${OPTIONS[name]}"
    run scancel --signal=TERM --name="${OPTIONS[name]}" ;;
  *) fail 'give an action: submit or cancel' ;;
esac
