#!/usr/bin/env bash
# Runs on a GKE cluster with TPU nodes, as a JobSet or through xpk.
#
#   bash launch/gke.sh [--dry-run] ACTION --name=NAME [OPTIONS] [-- FLAGS OF main]
#
#   build   builds the container and pushes it: --image=REGION-docker.pkg.dev/PROJECT/REPOSITORY/bert_jax
#   apply   starts the JobSet: --image=... --topology=v5e:4x4. It restarts [--max-restarts=100]
#           times after a preemption (75) or a failure (1), not after a mistake (2).
#           With several slices, --slices=2, the mesh has replicas: -- --config.mesh.replica=2 ...
#           --topology=v5e:2x4 or v6e:2x4 with --chips_per_host=8 uses one host of 8 chips
#           (ct5lp-hightpu-8t, ct6e-standard-8t) instead of two of 4
#   xpk     does the same through xpk: --cluster=NAME --image=... --type=v5litepod-16. The script
#           sets the exit codes to restart on: by default xpk restarts nothing, and with
#           --max-restarts alone only after exit codes 42 and 127-255
#   log     follows the log of the first host
#   delete  ends the job
#
# Needs docker, kubectl with the cluster's credentials, and the JobSet controller; or xpk.
# --dry-run prints the commands (and the manifest) and runs none.
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=launch/xla_flags.sh
. launch/xla_flags.sh
OPTIONS=([name]='' [image]='' [topology]=v5e:4x4 [cluster]='' [type]=v5litepod-16 [slices]=1
         [chips_per_host]='' [max-restarts]=100)
parse "$@"

json() { # words -> "a", "b"
  local word found=''
  for word in "$@"; do
    word="${word//\\/\\\\}"
    found+=", \"${word//\"/\\\"}\""
  done
  echo "${found#, }"
}

manifest() {
  local generation="${OPTIONS[topology]%%:*}" shape="${OPTIONS[topology]#*:}" chips=1 n
  local -A accelerators=([v4]=tpu-v4-podslice [v5e]=tpu-v5-lite-podslice [v5p]=tpu-v5p-slice
                         [v6e]=tpu-v6e-slice [tpu7x]=tpu7x)
  [[ -n "${accelerators[$generation]+known}" && "$shape" =~ ^[1-9][0-9]*(x[1-9][0-9]*)*$ ]] ||
    fail "unknown --topology=${OPTIONS[topology]}"
  for n in ${shape//x/ }; do chips=$((chips * n)); done
  local usual=$((chips < 4 ? chips : 4))
  local per_host="${OPTIONS[chips_per_host]:-$usual}"
  case "$generation:$chips:$per_host:$((chips % usual))" in
    v5e:8:8:0 | v6e:8:8:0 | *:"$usual:0") ;;
    *) fail "no pool of --topology=${OPTIONS[topology]} has --chips_per_host=$per_host: hosts have \
4 chips, or all 8 of v5e:2x4 and v6e:2x4" ;;
  esac
  local flags text key
  flags="$(xla_flags "$generation")"
  local -A values=(
    [NAME]="${OPTIONS[name]}" [IMAGE]="${OPTIONS[image]}" [SLICES]="${OPTIONS[slices]}"
    [MAX_RESTARTS]="${OPTIONS[max-restarts]}"
    [ACCELERATOR]="${accelerators[$generation]}" [TOPOLOGY]="$shape" [CHIPS]="$per_host"
    [HOSTS]="$((chips / per_host))" [FLAGS_VARIABLE]="${flags%%=*}" [FLAGS_VALUE]="${flags#*=}"
    [COMMAND]="$(json python -m bert_jax.main "${MAIN_FLAGS[@]}")")
  text="$(< launch/gke_jobset.yaml)"
  for key in "${!values[@]}"; do text="${text//"@$key@"/"${values[$key]}"}"; done
  echo "$text"
}

flags_given() {
  [ ${#MAIN_FLAGS[@]} -gt 0 ] || fail 'give the flags of the run: -- --config=... --workdir=...'
}

case "$ACTION" in
  build)
    need image
    run docker build -f launch/Containerfile -t "${OPTIONS[image]}" .
    run docker push "${OPTIONS[image]}" ;;
  apply)
    need name image
    flags_given
    text="$(manifest)" || exit 2  # before kubectl starts
    if $DRY_RUN; then
      echo "$text"
      echo 'kubectl apply -f -'
    else
      kubectl apply -f - <<< "$text"
    fi ;;
  xpk)
    need name image cluster
    flags_given
    [ -z "${OPTIONS[chips_per_host]}" ] ||
      fail 'xpk chooses the hosts by --type: leave out --chips_per_host'
    generation="$(generation "${OPTIONS[type]}")"
    run xpk workload create --cluster="${OPTIONS[cluster]}" --workload="${OPTIONS[name]}" \
      --tpu-type="${OPTIONS[type]}" --num-slices="${OPTIONS[slices]}" \
      --docker-image="${OPTIONS[image]}" --max-restarts="${OPTIONS[max-restarts]}" \
      --restart-on-exit-codes=1,75 --termination-grace-period-seconds=120 \
      --env="$(xla_flags "$generation")" \
      --command="python -m bert_jax.main $(quote "${MAIN_FLAGS[@]}")" ;;
  log)
    need name
    # The first host of the first slice: the others print no metrics.
    jobset=jobset.sigs.k8s.io
    run kubectl logs -f --tail=-1 -l "$jobset/jobset-name=${OPTIONS[name]},$jobset/job-index=0,\
batch.kubernetes.io/job-completion-index=0" ;;
  delete)
    need name
    run kubectl delete jobset "${OPTIONS[name]}" ;;
  *) fail 'give an action: build, apply, xpk, log or delete' ;;
esac
