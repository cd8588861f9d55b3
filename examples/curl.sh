#!/bin/sh
# The HTTP API with curl: sh examples/curl.sh [URL [MODEL]]. Sends the API key in KVMESH_API_KEY, if it is set.
set -eu
url=${1:-http://127.0.0.1:8000}
model=${2:-demo}
pretty() { python3 -m json.tool --no-ensure-ascii 2>/dev/null || cat; }
ask() { curl --fail-with-body --silent --show-error -H "Authorization: Bearer ${KVMESH_API_KEY:-none}" "$@"; echo; }
json='Content-Type: application/json'

echo "== models"
ask "$url/v1/models" | pretty
echo "== a chat"
ask "$url/v1/chat/completions" -H "$json" \
  -d "{\"model\": \"$model\", \"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}], \"max_tokens\": 32}" | pretty
echo "== the same, streamed"
ask --no-buffer "$url/v1/chat/completions" -H "$json" \
  -d "{\"model\": \"$model\", \"stream\": true, \"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}], \"max_tokens\": 4}"
echo "== tokens"
ask "$url/tokenize" -H "$json" -d "{\"model\": \"$model\", \"prompt\": \"Hello, mesh\"}" | pretty
echo "== a batch"
lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
for animal in cat rabbit horse; do
  echo "{\"custom_id\": \"$animal\", \"method\": \"POST\", \"url\": \"/v1/completions\", \"body\": {\"model\": \"$model\", \"prompt\": \"Once upon a time there was a $animal\", \"max_tokens\": 16}}"
done > "$lines"
field() { sed -n "s/.*\"$1\": *\"\([^\"]*\)\".*/\1/p"; }
file=$(ask "$url/v1/files" -F purpose=batch -F "file=@$lines" | field id)
batch=$(ask "$url/v1/batches" -H "$json" \
  -d "{\"input_file_id\": \"$file\", \"endpoint\": \"/v1/completions\", \"completion_window\": \"24h\"}" | field id)
status=validating
while [ "$status" = validating ] || [ "$status" = in_progress ] || [ "$status" = finalizing ]; do
  sleep 0.5
  answer=$(ask "$url/v1/batches/$batch")
  status=$(echo "$answer" | sed 's/.*"status": *"\([^"]*\)".*/\1/')
done
echo "batch $batch: $status"
ask "$url/v1/files/$(echo "$answer" | field output_file_id)/content" | sed 's/.*"custom_id": *"\([^"]*\)".*"text": *"\([^"]*\)".*/\1: ...\2/'
