#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Train a recipe under a YAML on hosts that may leave and come back, without a batch system. Start the
# same command on every host, in any order:
#
#   RECIPE=recipes/llama.py CONFIG=accelerate_configs/fsdp.yaml MEETING=host1:29400 HOSTS=1:4 \
#       ROWS_PER_STEP=768 OUTPUT_DIR=/shared/runs/full clusters/torchrun_elastic.sh --dataset_name rows.jsonl
#
# torchrun's elastic agent decides on ranks and addresses. MEETING is the host where the agents meet,
# which has to stay, and HOSTS the least and the largest number of them. When a host is lost, the others
# go on from the newest checkpoint (choose --save_steps); when one comes, all save, and go on together.
# A step always has ROWS_PER_STEP rows, so that the number of hosts changes nothing of what is trained.
# What no restart cures, such as a wrong argument or a full disk, ends all of them with the recipe's exit code.
#
# Other variables: GPUS, ranks on this host, by default its GPUs; BATCH, rows of a micro-batch on each
# rank, by default 8; RUN, a name, if two runs meet at one place. For rehearsals: LAUNCHER and RANK_PROGRAM.
set -uo pipefail

refuse() {
  echo "error: $1" >&2
  exit 64
}

[[ -f ${RECIPE-} ]] || refuse "RECIPE is the script to train, such as RECIPE=recipes/llama.py"
[[ -f ${CONFIG-} ]] || refuse "CONFIG is the YAML, such as CONFIG=accelerate_configs/fsdp.yaml"
[[ ${MEETING-} == *:* ]] || refuse "MEETING is where the agents meet, such as MEETING=host1:29400"
[[ ${HOSTS-} =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || refuse "HOSTS is how many hosts take part, such as HOSTS=1:4"
[[ ${ROWS_PER_STEP-} =~ ^[1-9][0-9]*$ ]] || refuse "ROWS_PER_STEP is the rows of a step, such as ROWS_PER_STEP=768"
[[ ${BATCH:-8} =~ ^[1-9][0-9]*$ ]] || refuse "BATCH is the rows of a micro-batch, such as BATCH=8"
[[ ${OUTPUT_DIR-} ]] || refuse "OUTPUT_DIR is the folder of the run, which all hosts share"
[[ " $* " != *" --output_dir"* ]] || refuse "OUTPUT_DIR names the folder of the run, not --output_dir"
GPUS=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
((GPUS > 0)) || refuse "nvidia-smi finds no GPU on this host"
for ((hosts = ${HOSTS%:*}; hosts <= ${HOSTS#*:}; hosts++)); do
  rows=$((${BATCH:-8} * GPUS * hosts))
  ((ROWS_PER_STEP % rows == 0)) ||
    refuse "ROWS_PER_STEP=$ROWS_PER_STEP is not a multiple of $rows, the rows of a micro-batch on $hosts hosts: choose another, or fewer HOSTS"
done

# accelerate has no options for these; its launcher is torchrun, which reads them here
export PET_NNODES=$HOSTS PET_RDZV_ENDPOINT=$MEETING PET_RDZV_ID=${RUN:-recipe}
# Otherwise the first agent tells its address only once, and a host that comes later waits for it in vain
# (torch 2.13, next_rendezvous of torch/distributed/elastic/rendezvous/dynamic_rendezvous.py)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Seconds that the agent gives its ranks to save when a host comes, instead of 30
export PET_SHUTDOWN_TIMEOUT=${PET_SHUTDOWN_TIMEOUT:-290}
mkdir -p "$OUTPUT_DIR" || exit 73
# status.json is newer once an attempt of this call has written it. Both have times of the same file system.
export BEGAN=$OUTPUT_DIR/.began-$HOSTNAME-$$
: >"$BEGAN" || exit 73
trap 'rm -f "$BEGAN"; rmdir "$OUTPUT_DIR"/.attempt-* 2>/dev/null' EXIT
export RECIPE OUTPUT_DIR ROWS_PER_STEP BATCH=${BATCH:-8} RANK_PROGRAM=${RANK_PROGRAM:-python}

# The exit code that the recipe recorded last, if this call has got so far
recorded() {
  if [[ $OUTPUT_DIR/status.json -nt $BEGAN ]]; then
    grep -oP '"exit_code": \K[0-9]+' "$OUTPUT_DIR/status.json" | tail -n 1
  fi
}

# Whether an earlier attempt ended for a reason that this one would meet too: a wrong argument, unusable rows,
# a loss that is not finite, a full disk or a wrong gradient. What this attempt itself records does not count,
# so that all of its ranks find the same. Each attempt has a port of its own, and its first rank the folder.
no_restart_helps() {
  local attempt=$OUTPUT_DIR/.attempt-$MASTER_PORT
  mkdir "$attempt" 2>/dev/null
  [[ $(recorded) =~ ^(64|65|70|73|76)$ && $attempt -nt $OUTPUT_DIR/status.json ]]
}

# One rank, which knows how many there are now
rank() {
  # torchrun restarts ranks after every exit code but 0, so that with 0 the agents of all hosts end
  no_restart_helps && exit 0
  local rows=$((BATCH * WORLD_SIZE))
  if ((ROWS_PER_STEP % rows)); then
    echo "error: ROWS_PER_STEP=$ROWS_PER_STEP is not a multiple of $rows, BATCH=$BATCH on $WORLD_SIZE ranks" >&2
    exit 64
  fi
  # RANK_PROGRAM is several words in a rehearsal
  exec $RANK_PROGRAM "$RECIPE" --output_dir "$OUTPUT_DIR" --per_device_train_batch_size "$BATCH" \
    --gradient_accumulation_steps $((ROWS_PER_STEP / rows)) "$@"
}
export -f recorded no_restart_helps rank

# One machine for accelerate, since only torchrun knows how many there are
${LAUNCHER:-accelerate launch} --config_file "$CONFIG" --num_machines 1 --num_processes "$GPUS" \
  --main_process_port 0 --rdzv_backend c10d --rdzv_conf "${RDZV_CONF:-last_call_timeout=30}" \
  --max_restarts 100 --tee 3 --no_python bash -c 'rank "$@"' rank "$@" &
agent=$!
trap 'kill -TERM "$agent" 2>/dev/null' TERM INT
wait "$agent"
code=$?
while kill -0 "$agent" 2>/dev/null; do # it was only the trap that ended the wait
  wait "$agent"
  code=$?
done

# Launchers end with 1 whatever the recipe ended with, and with 0 after the ranks of `no_restart_helps`
ended=$(recorded)
code=${ended:-$code}
if ((code)); then
  echo "ended with exit code $code: $OUTPUT_DIR/status.json says why" >&2
fi
exit "$code"
