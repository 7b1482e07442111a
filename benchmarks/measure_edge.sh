#!/usr/bin/env bash
# Measures what results/ holds for one CPU that does nothing else: benchmarks/measure_edge.sh FOLDER NAME
# NAME, such as cpu, ends the files' names. What is there already is not measured again, so it can be stopped and run
# again at any time. Exports and compiled code are kept in FOLDER/.files; with `warm` as a third word only these are
# made, which takes most of the time and needs no quiet machine.
set -u
out=$1 name=$2 warm=${3-}
export TORCHINDUCTOR_CACHE_DIR=$out/.files/inductor
mkdir -p "$out/.files"

edge() { # result, model, then sizes@runtimes and further words of the command
  local file=$out/edge-$1-$name.json model=$2 at how=()
  shift 2
  while [[ $1 == *@* ]]; do
    how+=("$1")
    shift
  done
  for at in "${how[@]}"; do
    local given=(--size "${at%@*}" --runtime "${at#*@}" --threads 1,2 --files "$out/.files")
    if [ "$warm" ]; then
      python3 -m linvit bench edge "$model" "${given[@]}" "$@" --budget 0.01 -o "$(mktemp -u).json" >/dev/null
    elif [ -e "$file" ]; then
      python3 -m linvit bench edge "$model" "${given[@]}" "$@" --budget 1.5 --resume "$file" >/dev/null
    else
      python3 -m linvit bench edge "$model" "${given[@]}" "$@" --budget 1.5 -o "$file" >/dev/null
    fi
  done
  echo "$model: $SECONDS s"
}

plans=auto,mixa,stella,relu_linear
all=eager,compiled,onnx,openvino,executorch
edge deit_tiny14 deit_tiny_patch16_224 224@$all 448@eager,onnx,openvino 896@onnx,openvino \
  --plan $plans --model-arg patch_size=14
edge deit_small deit_small_patch16_224 224@$all 448@onnx,openvino --plan $plans
edge efficientformerv2_s0 efficientformerv2_s0 224@$all 448@onnx,openvino \
  --plan ${plans/mixa/mixa:keep=2} --drop relative_bias,talking_heads
edge pvt_v2_b0 pvt_v2_b0 224@$all 448@onnx,openvino --plan $plans
edge swin_tiny swin_tiny_patch4_window7_224 224@$all 448@openvino --plan $plans --drop relative_bias,shift_mask
edge qtvit_1 qtvit_1 224@$all 448@onnx,openvino --plan softmax,auto,stella,relu_linear
