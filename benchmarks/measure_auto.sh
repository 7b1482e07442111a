#!/usr/bin/env bash
# Measures what the plan `auto` converts of 30 families of timm, and what that buys: benchmarks/measure_auto.sh FOLDER NAME [WORDS…]
# NAME, such as cpu, ends the file's name; WORDS go to `linvit bench auto`, such as --size 224. On a CPU it takes an hour
# and wants a core that does nothing else. What is there already is not measured again.
set -u
# One thread, which keeps its memory between calls, as in `bench edge`; neither matters to a GPU.
export OMP_NUM_THREADS=1
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824
out=$1 name=$2
shift 2
models=deit_tiny_patch16_224,vit_small_patch14_dinov2,vit_small_patch16_dinov3,eva02_tiny_patch14_224,samvit_base_patch16
models+=,sam2_hiera_tiny,hiera_tiny_224,swin_tiny_patch4_window7_224,swinv2_cr_tiny_224,davit_tiny,tiny_vit_5m_224
models+=,pvt_v2_b0,mvitv2_tiny,twins_pcpvt_small,nest_tiny,gcvit_xxtiny,coatnet_nano_rw_224,caformer_s18,nextvit_small
models+=,fastvit_sa12,levit_128s,efficientformer_l1,efficientformerv2_s0,efficientvit_b0,mobilevit_xxs,pit_ti_224
models+=,cait_xxs24_224,xcit_nano_12_p16_224,visformer_tiny,volo_d1_224
file=$out/auto-$name.json
mkdir -p "$out"
if [ -e "$file" ]; then
  python3 -m linvit bench auto "$models" --size 224,1024 "$@" --resume "$file"
else
  python3 -m linvit bench auto "$models" --size 224,1024 "$@" -o "$file"
fi
