#!/bin/sh
# Lists a frontend's services and calls them, with nothing but server reflection: sh examples/grpc.sh [ADDRESS [MODEL]]
# PYTHON names another Python than the one of the clone's virtual environment.
set -eu
address=${1:-127.0.0.1:50051}
model=${2:-demo}
here=$(dirname "$0")
call() { "${PYTHON:-$here/../.venv/bin/python}" "$here/grpc_call.py" "$address" "$@"; }

echo "== services"
call
echo "== methods"
call kvmesh.inference.v1.InferenceService
echo "== models"
call kvmesh.inference.v1.InferenceService/ListModels
echo "== a text, continued as it comes"
call kvmesh.inference.v1.InferenceService/Generate \
  "{\"model\": \"$model\", \"text\": \"Once upon a time\", \"options\": {\"stream\": true, \"sampling\": {\"max_tokens\": 8}}}"
echo "== a conversation, whole"
call kvmesh.inference.v1.InferenceService/Chat \
  "{\"model\": \"$model\", \"messages\": [{\"role\": \"CHAT_ROLE_USER\", \"content\": \"Hello\"}], \"options\": {\"sampling\": {\"max_tokens\": 8}}}"
echo "== the Open Inference Protocol"
call inference.GRPCInferenceService/ModelReady "{\"name\": \"$model\"}"
