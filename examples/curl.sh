#!/bin/sh
# The HTTP API with curl: examples/curl.sh http://127.0.0.1:8000 [MODEL]; an API key is taken from KVMESH_API_KEY.
set -eu
url=$1
model=${2:-demo}
ask() { curl --fail-with-body --silent --show-error -H "Authorization: Bearer ${KVMESH_API_KEY:-none}" "$@"; echo; }
json='Content-Type: application/json'

echo "== models"
ask "$url/v1/models"
echo "== a chat"
ask "$url/v1/chat/completions" -H "$json" \
  -d "{\"model\": \"$model\", \"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}], \"max_tokens\": 8}"
echo "== the same as it comes"
ask --no-buffer "$url/v1/chat/completions" -H "$json" \
  -d "{\"model\": \"$model\", \"stream\": true, \"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}], \"max_tokens\": 4}"
echo "== tokens"
ask "$url/tokenize" -H "$json" -d "{\"model\": \"$model\", \"prompt\": \"Hello, mesh\"}"
echo "== a batch"
lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
for i in 1 2 3; do
  echo "{\"custom_id\": \"line-$i\", \"method\": \"POST\", \"url\": \"/v1/completions\", \"body\": {\"model\": \"$model\", \"prompt\": \"Number $i\", \"max_tokens\": 4}}"
done > "$lines"
file=$(ask "$url/v1/files" -F purpose=batch -F "file=@$lines" | sed 's/.*"id": *"\([^"]*\)".*/\1/')
ask "$url/v1/batches" -H "$json" \
  -d "{\"input_file_id\": \"$file\", \"endpoint\": \"/v1/completions\", \"completion_window\": \"24h\"}"
