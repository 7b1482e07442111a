#!/usr/bin/env bash
# Detection and segmentation on VOC 2012, on one GPU: benchmarks/measure_voc.sh WORK SETS WEIGHTS PART…
# WORK keeps trunks and stores and has to outlast the commands; SETS has voc256.tar and imagenette128.tar, WEIGHTS
# sam2_hiera_tiny.fp16.safetensors. PART is one or some of these, with what an H200 is guessed to need:
#   segment  SemanticFPN on SAM 2's Hiera-T: 8 minutes without labels, 14 with (voc-segment-*.toml)
#   detect   Faster R-CNN on it, the same (voc-detect-*.toml)
#   adapter  SemanticFPN on imagenette's ViT-Tiny with a ViT-Adapter: 3 minutes for the classifier, 13 for the runs
#   adapter-detect  Faster R-CNN on it: 13 minutes (voc-vit-*.toml)
# It stops after LIMIT seconds (540), and the same command goes on. WORK/packed has each store without the originals'
# weights, which fit into no archive: what begins with one is finished where that was trained. The speeds of whole
# detectors are `measure.sh FOLDER NAME dense`.
set -u
work=$1 sets=$2 weights=$3
shift 3
limit=${LIMIT:-540}
mkdir -p "$work/packed"

within() { # the command, stopped when the time is up so that it can go on
  local left=$((limit - SECONDS))
  [ $left -gt 10 ] || return 124
  timeout -s INT -k 30 $left "$@"
}

compare() { # store, comparison, trunk, runs at a time
  [ $((limit - SECONDS)) -gt 10 ] || return # what is there was packed when it was made
  within python3 -m linvit compare "benchmarks/comparisons/$2.toml" --data "$sets/voc256.tar" --backbone "$work/$3" \
    --per-gpu "$4" -o "$work/$1"
  echo "$2: $SECONDS s"
  [ -d "$work/$1/runs" ] || return
  local slim=$work/packed/$1
  rm -rf "$slim"
  mkdir -p "$slim"
  cp -r "$work/$1/runs" "$work/$1/comparisons" "$slim" && python3 -m linvit compare -o "$slim" --pack "$slim.tar.xz"
  rm -rf "$slim"
}

for part in "$@"; do
  case $part in
    segment | detect)
      [ -e "$work/hiera/config.json" ] || python3 -m scripts.sam2 save "$weights" "$work/hiera"
      compare "voc-$part-fast" "voc-$part-labelfree" hiera 3
      compare "voc-$part-fast" "voc-$part-fast" hiera 8
      ;;
    adapter | adapter-detect)
      if [ ! -e "$work/vit_tiny16/config.json" ]; then
        resume=
        [ -e "$work/imagenette" ] && resume=--resume
        plain=(mixup=0.2 cutmix=0 erasing=0 randaugment=none colour_jitter=0.3 crop_scale=0.25,1 test_crop=1 repeats=1)
        plain+=(epochs=200 warmup_epochs=10 batch_size=256 lr=1e-3 lr_batch=none ema=none clip_norm=1 eval_epochs=20)
        within python3 -m linvit train vit_tiny_patch16_224 --no-pretrained --model-arg img_size=128 \
          --model-arg patch_size=8 --data "$sets/imagenette128.tar" --recipe deit "${plain[@]/#/--set=}" $resume \
          -o "$work/imagenette" || exit
        python3 - "$work" <<'PYTHON'
import sys

import linvit

model = linvit.load(f"{sys.argv[1]}/imagenette/last")
linvit.resample_patches(model, 16, 256)
linvit.save(model, f"{sys.argv[1]}/vit_tiny16")
PYTHON
      fi
      head=segment
      [ "$part" = adapter ] || head=detect
      compare voc-vit "voc-vit-$head" vit_tiny16 8
      ;;
  esac
done
