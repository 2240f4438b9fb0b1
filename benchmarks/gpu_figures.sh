# Layers of the four named shapes on one GPU beside others, and what `moe-core tune` says of them.
#
# Run in the repository root: OUT=FOLDER bash benchmarks/gpu_figures.sh [options of tune]
#
# Writes bf16.json and fp8.json, as docs/benchmarks.md quotes them (charts: `moe-core bench --read FILE --plot FILE`), and
# the shipped table of this card with the times of this run in it. Takes about four minutes of an H100: what is not
# finished within a part's limit is left out, and what was measured until then is kept.
: "${OUT:?the folder for results}"
began=$SECONDS
part() { # name, limit in seconds, command ...
  local name=$1 limit=$2
  shift 2
  timeout -s INT -k 5 "$limit" "$@" >"$OUT/$name.txt" 2>&1
  echo "$name: rc $?, until $((SECONDS - began)) s"
}
each() { # option, values ...
  local option=$1 value
  shift
  for value in "$@"; do printf '%s %s ' "$option" "$value"; done
}

card=$(python -c 'import torch; print(torch.cuda.get_device_name())')
case $card in
  *H100*) table=h100 ;;
  *H200*) table=h200 ;;
  *) table=table ;;
esac
echo "$card: times go to $table.json"
cp "moe_core/tables/$table.json" "$OUT/" 2>/dev/null

bench="python -m moe_core bench --seconds 0.3 $(each --tokens 1 16 64 256 2048 8192)"
tune="python -m moe_core tune --seconds 0.3 --output $OUT/$table.json $*"
two=$(each --shape qwen3-30b-a3b deepseek-v3)
four="$two $(each --shape mixtral-8x7b qwen3.5-397b-a17b)"
part bf16 "${BENCH_LIMIT:-120}" $bench $four --issue-time --memory --output "$OUT/bf16.json" \
  --peer "torch grouped_mm" --peer "transformers grouped_mm" --peer "transformers batched_mm" --peer moe-ops
part fp8 20 $bench $two --quant-scheme fp8_block128 --peer none --output "$OUT/fp8.json"
# Times of 1024 tokens and more have to be taken together with those of plugins that are installed for them.
few=$(each --tokens 1 2 4 8 16 32 64 128 256 512)
part tune-quantized 40 $tune --shape qwen3-30b-a3b $(each --quant-scheme w8a8_int8 w4a16_int4_g128 mxfp4_w4a16)
part tune-fp8 22 $tune $two $few --quant-scheme fp8_block128
part tune-bf16 40 $tune $four $few
