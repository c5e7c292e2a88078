#!/bin/sh
# Run against `llamarack serve` (llama.cpp on the CPU, SmolLM2-135M-Instruct Q4_1), with curl 7.88.1.
# Settings that matter: --no-buffer shows each token as it comes; --max-time limits the whole answer;
# --fail-with-body (curl 7.76) makes an HTTP error an exit code and still shows the reason.
#   LLAMARACK_URL=http://127.0.0.1:8080 MODEL=llama2-13b-chat examples/curl/chat.sh "Say hello"
set -eu
url=${LLAMARACK_URL:-http://127.0.0.1:8080}
model=${MODEL:?MODEL is not set: curl $url/v1/models lists the ids}
prompt=${1:-Say hello}

# JSON text by a JSON writer: quotes and line ends in the prompt stay data.
body=$(MODEL="$model" PROMPT="$prompt" python3 -c '
import json, os
print(json.dumps({"model": os.environ["MODEL"], "max_tokens": 32, "stream": True,
                  "messages": [{"role": "user", "content": os.environ["PROMPT"]}]}))')

curl --silent --show-error --no-buffer --fail-with-body --connect-timeout 10 --max-time 600 \
  --header "Content-Type: application/json" \
  ${LLAMARACK_API_KEY:+--header "Authorization: Bearer $LLAMARACK_API_KEY"} \
  --data "$body" "$url/v1/chat/completions"
