#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Train a recipe under a YAML on hosts that may leave and come back, without a batch system. Start the
# same command on every host, in any order, within ten minutes:
#
#   RECIPE=recipes/llama.py CONFIG=accelerate_configs/fsdp.yaml MEETING=host1:29400 HOSTS=1:4 \
#       ROWS_PER_STEP=768 OUTPUT_DIR=/shared/runs/full clusters/torchrun_elastic.sh --dataset_name rows.jsonl
#
# torchrun's elastic agent decides on ranks and addresses. MEETING is the host where the agents meet,
# which has to stay, and HOSTS the least and the largest number of them. When a host is lost, the others
# go on from the newest checkpoint (choose --save_steps); when one comes, all save, and go on together.
# A step always has ROWS_PER_STEP rows, so that the number of hosts changes nothing of what is trained.
# A YAML with a mesh, and pipelines, need one number of ranks: clusters/slurm.sbatch takes them.
# What no restart cures, such as a wrong argument or a full disk, ends all of them with the recipe's exit code.
#
# Other variables: GPUS, ranks on this host, by default its GPUs; BATCH, rows of a micro-batch on each
# rank, by default 8; RUN, a name, if two runs meet at one place; JOIN_TIMEOUT, seconds in which the hosts
# have to come, by default 600. For rehearsals: LAUNCHER and RANK_PROGRAM.
# shellcheck disable=SC2016,SC2329 # other shells expand and call them
set -uo pipefail

refuse() {
  echo "error: $1" >&2
  exit "${2:-64}"
}

# Whether a text is a whole number from 1 on, which bash can count with
is_number() {
  [[ $1 =~ ^[1-9][0-9]{0,8}$ ]]
}

export BATCH=${BATCH:-8}
JOIN_TIMEOUT=${JOIN_TIMEOUT:-600}

[[ -f ${RECIPE-} ]] || refuse "RECIPE is the script to train, such as RECIPE=recipes/llama.py"
[[ -f ${CONFIG-} ]] || refuse "CONFIG is the YAML, such as CONFIG=accelerate_configs/fsdp.yaml"
if ! [[ ${MEETING-} =~ ^([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):([1-9][0-9]{0,4})$ ]] || ((BASH_REMATCH[2] > 65535)); then
  refuse "MEETING is where the agents meet, a host and a port, such as MEETING=host1:29400"
fi
[[ ${HOSTS-} =~ ^([1-9][0-9]{0,4})(:([1-9][0-9]{0,4}))?$ ]] ||
  refuse "HOSTS is how many hosts take part, such as HOSTS=1:4"
least=${BASH_REMATCH[1]} most=${BASH_REMATCH[3]:-${BASH_REMATCH[1]}}
((least <= most)) || refuse "HOSTS=$HOSTS has to begin with the least number: HOSTS=$most:$least"
is_number "${ROWS_PER_STEP-}" || refuse "ROWS_PER_STEP is the rows of a step, such as ROWS_PER_STEP=768"
is_number "$BATCH" || refuse "BATCH is the rows of a micro-batch, such as BATCH=8"
is_number "$JOIN_TIMEOUT" || refuse "JOIN_TIMEOUT is seconds, such as JOIN_TIMEOUT=600"
if [[ ! ${GPUS-} ]]; then
  GPUS=$(nvidia-smi --list-gpus 2>/dev/null | grep -c ^GPU)
  ((GPUS)) || refuse "nvidia-smi finds no GPU on this host: GPUS=N says how many ranks it has"
fi
is_number "$GPUS" || refuse "GPUS is how many ranks this host has, such as GPUS=8"
[[ ${OUTPUT_DIR-} ]] || refuse "OUTPUT_DIR is the folder of the run, which all hosts share"
command -v python >/dev/null || refuse "there is no python: activate the environment with requirements.txt"

# ---- What fits a changing number of hosts ----
grep -Eq "^distributed_type: *[\"']?(MULTI_GPU|FSDP|DEEPSPEED)\b" "$CONFIG" ||
  refuse "CONFIG=$CONFIG is not for several processes: its distributed_type has to be MULTI_GPU, FSDP or DEEPSPEED, as in accelerate_configs/ddp.yaml"
# Every rank has to have rows of its own, and their number has to be free
if grep -Eq '^parallelism_config: *([^ {]|$|\{ *[^ }])' "$CONFIG"; then
  refuse "CONFIG=$CONFIG has a mesh, which fits one number of ranks: take a YAML without parallelism_config, or clusters/slurm.sbatch"
fi
if grep -q 'extras\.pipeline' "$RECIPE"; then
  refuse "RECIPE=$RECIPE trains pipelines, whose ranks share rows: take recipes/llama.py, or clusters/slurm.sbatch"
fi
for word in "$@"; do
  case ${word//-/_} in # recipes know --output-dir and the like too
    __output_dir | __output_dir=*) refuse "OUTPUT_DIR names the folder of the run, not ${word%%=*}" ;;
    __per_device_train_batch_size | __per_device_train_batch_size=*)
      refuse "BATCH is the rows of a micro-batch, not ${word%%=*}"
      ;;
    __gradient_accumulation_steps | __gradient_accumulation_steps=*)
      refuse "ROWS_PER_STEP decides on the accumulation, not ${word%%=*}"
      ;;
  esac
done
for ((hosts = least; hosts <= most; hosts++)); do
  rows=$((BATCH * GPUS * hosts))
  ((ROWS_PER_STEP % rows == 0)) ||
    refuse "ROWS_PER_STEP=$ROWS_PER_STEP is not a multiple of $rows, the rows of a micro-batch on $hosts hosts: choose another, or fewer HOSTS"
done

# A wrong flag leaves no status.json, by which the ranks below know that no restart helps
python - "$RECIPE" --output_dir "$OUTPUT_DIR" "$@" <<'END' || exit
import os, runpy, sys

del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
recipe = runpy.run_path(sys.argv[0])
recipe["parse"](recipe["Arguments"])
END

# accelerate has no options for these; its launcher is torchrun, which reads them here
export PET_NNODES=$HOSTS PET_RDZV_ENDPOINT=$MEETING PET_RDZV_ID=${RUN:-recipe}
# Otherwise the first agent tells its address only once, and a host that comes later waits for it in vain
# (torch 2.13, next_rendezvous of torch/distributed/elastic/rendezvous/dynamic_rendezvous.py)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Seconds that the agent gives its ranks to save when a host comes, instead of 30
export PET_SHUTDOWN_TIMEOUT=${PET_SHUTDOWN_TIMEOUT:-290}
# status.json is newer once an attempt of this call has written it. Both have times of the same file system.
export BEGAN=$OUTPUT_DIR/.began-$HOSTNAME-$$
failure=$({ mkdir -p "$OUTPUT_DIR" && : >"$BEGAN"; } 2>&1) ||
  refuse "OUTPUT_DIR=$OUTPUT_DIR cannot be written (${failure##*: }): choose a folder that can" 73
trap 'rm -f "$BEGAN"; rmdir "$OUTPUT_DIR"/.attempt-* 2>/dev/null' EXIT
export RECIPE OUTPUT_DIR ROWS_PER_STEP RANK_PROGRAM=${RANK_PROGRAM:-python}

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

# ---- The host where the agents meet ----
host=${MEETING%:*} port=${MEETING##*:}
host=${host#[} host=${host%]}

# Whether MEETING names this host: only its own addresses can be bound. 2: the name is not known here
is_this_host() {
  python - "$host" <<'END'
import socket, sys

try:
    family, _, _, _, address = socket.getaddrinfo(sys.argv[1], 0, type=socket.SOCK_STREAM)[0]
except OSError:
    sys.exit(2)
with socket.socket(family) as one:
    try:
        one.bind(address)
    except OSError:
        sys.exit(1)
END
}

answers() {
  timeout 5 bash -c ': <"/dev/tcp/$1/$2"' answers "$host" "$port" 2>/dev/null
}

# torch gives up after a minute, with a traceback. Its read_timeout is no cure: reads of a store whose host is
# lost would wait as long.
wait_for_meeting() {
  local end=$((SECONDS + JOIN_TIMEOUT))
  echo "waiting up to $JOIN_TIMEOUT s for the same command on $host, which does not answer at $MEETING yet" >&2
  until answers; do
    ((SECONDS < end)) ||
      refuse "$host does not answer at $MEETING after $JOIN_TIMEOUT s: start the same command there too" 1
    sleep 1
  done
}

# Its first agent has the store. torch would not know all names and addresses of a host.
has_store=0
is_this_host
case $? in
  0) answers || has_store=1 ;;
  1) answers || wait_for_meeting ;;
  *) refuse "MEETING=$MEETING: the name $host is not known on this host: give the address instead" ;;
esac

# One machine for accelerate, since only torchrun knows how many there are
${LAUNCHER:-accelerate launch} --config_file "$CONFIG" --num_machines 1 --num_processes "$GPUS" \
  --main_process_port 0 --rdzv_backend c10d \
  --rdzv_conf "is_host=$has_store,join_timeout=$JOIN_TIMEOUT,${RDZV_CONF:-last_call_timeout=30}" \
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
if [[ $ended && $ended != 0 ]]; then
  echo "ended with exit code $code: $OUTPUT_DIR/status.json says why" >&2
elif ((code)); then
  echo "ended with exit code $code, of which the recipe has recorded nothing: the lines above say why" >&2
fi
exit "$code"
