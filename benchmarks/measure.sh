#!/usr/bin/env bash
# Measures what results/ holds for one GPU: benchmarks/measure.sh FOLDER NAME [warm] [PART…]
# NAME, such as h200, ends the files' names. PART is one or some of
#   kernels   the papers' mechanisms, QT-ViT's with its shortcut too, beside SDPA on the shapes of the preset `kernels`
#   models    ViT-B, DINOv2-B, SigLIP So400m, DeiT-S and Swin-T, compiled, beside their softmax
#   auto      what the plan auto converts of ten models, and what that buys
#   dense     detectors and segmenters on ViT-Tiny at 448 and 1,024 pixels, backbone and neck compiled, beside their softmax
#   older     the results that came before these
# or all of them, in this order. With IMAGES=imagenette128.tar `older` measures training as well. With `warm` the same is
# run all at once and nothing is kept: compilers fill their caches, which takes most of the time otherwise. What is
# finished is not measured again, and what was stopped goes on.
set -u
images=${IMAGES-}
out=$1 name=$2 warm=
shift 2
if [ "${1-}" = warm ]; then
  warm=1
  shift
  export TORCHINDUCTOR_COMPILE_THREADS=4
fi
parts=${*:-kernels models auto dense older}
part() { [[ " $parts " == *" $1 "* ]]; }

bench() { # result, then the command; a result that is finished is left alone
  local file=$out/$1-$name.json quick=(--budget 0.0001)
  shift
  [ "$1" = training ] && quick=(--steps 75)
  if grep -qs '"complete": true' "$file"; then
    return
  elif [ "$warm" ]; then
    python3 -m linvit bench "$@" "${quick[@]}" -o "$(mktemp -u).json" >/dev/null 2>&1 &
  else
    python3 -m linvit bench "$@" "$([ -e "$file" ] && echo --resume || echo --output)" "$file"
    echo "$SECONDS s"
  fi
}

# result's short name, then a mechanism with its options
kernels() {
  bench "op-$1-kernels" op -m "${@:2}" --preset kernels --budget 0.02 \
    --compared "$([ "$warm" ] && echo ours || echo ours,sdpa)"
}
if part kernels; then
  for mechanism in castling qt efficient mobile relu_linear stella relu_quadratic angular elu_linear; do
    kernels $mechanism $mechanism
  done
  kernels qt-shortcut qt --option shortcut=true
fi

# model's short name, then words of the command
compiled() {
  bench "model-$1" model "${@:2}" --runtime compiled,graph --budget 0.5
}
if part models; then
  for plan in stella relu_linear mixa castling qt; do
    compiled vit_base-$plan vit_base_patch16_224 --plan $plan --size 1024 --batch 8
    compiled dinov2_base-$plan vit_base_patch14_dinov2 --plan $plan --size 518 --batch 16
    compiled siglip_so400m-$plan vit_so400m_patch14_siglip_384 --plan $plan --size 384 --batch 16
    compiled deit_small-$plan-sizes deit_small_patch16_224 --plan $plan --size 224,224,448,896,1792 --batch 64,256,64,16,4
  done
  compiled swin_tiny-mixa-compiled swin_tiny_patch4_window7_224 --plan mixa --size 224,448 --batch 128,32
fi

if part auto; then
  some=deit_small_patch16_224,vit_base_patch14_dinov2,vit_small_patch16_dinov3,samvit_base_patch16,sam2_hiera_tiny
  some+=,swin_tiny_patch4_window7_224,hiera_tiny_224,tiny_vit_5m_224,davit_tiny,pvt_v2_b2
  bench auto auto $some --size 224,1024
fi

if part dense; then
  for head in faster_rcnn semantic_fpn; do
    for pyramid in simple adapter; do
      bench dense-$head-$pyramid model $head --model-arg backbone=vit_tiny_patch16_224 --model-arg num_classes=20 \
        --model-arg pyramid=$pyramid --plan stella,mixa:keep=6 --size 448,1024 --batch 32,8 --runtime compiled --budget 0.5
    done
  done
fi

if [ "$warm" ]; then
  wait
fi
part older || exit 0

deit=(model deit_small_patch16_224 --plan stella)
sizes=(--size 224,224,896,1792 --batch 64,256,16,4)
corners=(op -m stella --heads 3,12 --head-dim 16,64 --tokens 784,3136,12544)
quadratic=(op -m relu_quadratic --batch 64 --heads 6 --head-dim 64 --tokens 784,1024,3136,12544)
windows=(op -m relu_quadratic --bias --batch 1024 --heads 3 --head-dim 32 --tokens 49,196)
swin=(model swin_tiny_patch4_window7_224 --plan mixa --model-arg window_size=14)
efficient=(op -m efficient --batch 64 --heads 6 --head-dim 64 --tokens 196,784,3136,12544)
mobile=(op -m mobile --batch 64 --heads 6 --head-dim 64 --tokens 196,784,3136)

tiny=(training vit_tiny_patch16_224 --model-arg img_size=128 --model-arg patch_size=8 --data "$images")

if [ "$warm" ]; then
  for size in "224 64" "224 256" "896 16" "1792 4"; do
    read -r pixels batch <<<"$size"
    bench model-deit_small-stella "${deit[@]}" --size "$pixels" --batch "$batch" --runtime compiled --passes training
  done
  bench model-deit_small-stella "${deit[@]}" "${sizes[@]}" --runtime compiled --passes inference
  bench op-stella op -m stella --preset deit --compared compiled
  for batch in 1 8 64; do
    bench op-stella-compiled "${corners[@]}" --batch $batch --compared ours,compiled
  done
  for dim in 16 32 64; do
    bench op-stella-grid op -m stella --batch 1,8,64 --heads 3,6,12 --head-dim $dim \
      --tokens 196,256,784,1024,4096,12544 --compared ours
  done
  bench op-relu_quadratic "${quadratic[@]}" --compared ours
  bench op-relu_quadratic-bias "${windows[@]}" --compared ours
  bench op-mobile "${mobile[@]}" --compared ours
  bench op-efficient "${efficient[@]}" --compared ours
  if [ "$images" ]; then
    for recipe in distil fast; do
      for some in mixa,stella relu_linear,castling qt,mobile efficient,xca; do
        bench training-vit_tiny-$recipe "${tiny[@]}" --recipe $recipe --plan $some
      done
    done
  fi
  wait
  exit
fi

bench model-deit_small-stella "${deit[@]}" "${sizes[@]}" --runtime compiled,graph --budget 0.5
bench op-stella-grid op -m stella --preset grid --compared ours,sdpa --budget 0.02
bench op-stella op -m stella --preset deit --budget 0.04
bench op-stella-compiled "${corners[@]}" --batch 1,8,64 --compared ours,compiled --budget 0.02
if [ "$images" ]; then
  bench training-vit_tiny "${tiny[@]}" --recipe deit --set batch_size=256 --plan stella
  for recipe in distil fast; do
    bench training-vit_tiny-$recipe "${tiny[@]}" --recipe $recipe --steps 100 \
      --plan mixa,stella,relu_linear,castling,qt,mobile,efficient,xca
  done
fi
bench op-stella-host op -m stella --batch 1 --heads 3 --head-dim 16,64 --tokens 196 --compared ours,sdpa --budget 0.8
bench op-relu_quadratic "${quadratic[@]}" --compared ours,sdpa,reference --budget 0.04
bench op-relu_quadratic-bias "${windows[@]}" --compared ours,sdpa,reference --budget 0.04
bench op-mobile "${mobile[@]}" --compared ours,sdpa,reference --budget 0.04
bench op-efficient "${efficient[@]}" --compared ours,sdpa,reference --budget 0.04
bench model-deit_small-stella-eager "${deit[@]}" "${sizes[@]}" --runtime eager --budget 0.2
bench model-swin_tiny-mixa "${swin[@]}" --size 224 --batch 128 --runtime eager --budget 0.5
