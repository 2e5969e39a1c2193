{{/* The parts of a worker over vLLM that other workers do not have. */}}

{{/* Arguments of vLLM's EngineArgs, as JSON: those of the values, the pool's draft where they describe speculation, and one
     rank for each GPU. Argument: pool. */}}
{{- define "laps-sd.vllmArgs" -}}
{{- $args := deepCopy .workers.vllmArgs -}}
{{- $draft := include "laps-sd.modelFolder" .draft -}}
{{- if and $draft $args.speculative_config }}{{ $_ := set $args.speculative_config "model" (printf "/models/%s" $draft) }}{{ end -}}
{{- $gpus := include "laps-sd.gpus" .workers | int -}}
{{- if and $gpus (not $args.tensor_parallel_size) -}}
{{- $_ := set $args "tensor_parallel_size" (div $gpus (int ($args.pipeline_parallel_size | default 1))) -}}
{{- end -}}
{{- toJson $args -}}
{{- end -}}

{{/* Arguments of vLLM that the worker or the chart sets, as YAML: what to do instead. */}}
{{- define "laps-sd.vllmReserved" -}}
model: target names the model, for the gateways too, which need its tokenizer
max_model_len: contextTokens is this limit, for the gateways too, which must have the same
dtype: set settings.dtype
kv_cache_memory_bytes: set settings.kvMemoryBytes
num_gpu_blocks_override: set settings.kvBlocks
max_num_active_seqs: set settings.slots
max_num_seqs: set settings.vllmResidents
max_num_batched_tokens: set settings.prefillChunk
enable_chunked_prefill: a round may compute a part of a context
enable_prefix_caching: set settings.prefixReuseTokens
trust_remote_code: set settings.trustRemoteCode
data_parallel_size: set replicas, which are workers of their own
enable_lora: adapters names them
max_loras: all of adapters stay loaded
async_scheduling: set settings.vllmOverlap
logits_processors: they would change the choice of tokens
scheduler_cls: LAPS-SD has its own
skip_tokenizer_init: it follows from the model
{{- end -}}

{{/* Seconds in which a worker must be up: with vLLM the model is then loaded, compiled, and its graphs are captured.
     Argument: values of the workers. */}}
{{- define "laps-sd.startupSeconds" -}}
{{ .startupSeconds | default (ternary 1200 120 (eq .engine "vllm")) | int }}
{{- end -}}

{{/* Size of /dev/shm: the ranks of several GPUs exchange data there. Argument: values of the workers. */}}
{{- define "laps-sd.sharedMemory" -}}
{{ .sharedMemory | default (ternary "8Gi" "1Gi" (gt (include "laps-sd.gpus" . | int) 1)) }}
{{- end -}}

{{/* LoRA adapters, in the form of LAPS_SD_ADAPTERS. Argument: pool. */}}
{{- define "laps-sd.adapters" -}}
{{- $found := list -}}
{{- range $name, $folder := .adapters }}{{ $found = append $found (printf "%s=/models/%s" $name $folder) }}{{ end -}}
{{- join "," $found -}}
{{- end -}}

{{/* The environment of a worker over vLLM. Argument: pool. */}}
{{- define "laps-sd.vllmEnv" -}}
{{- with include "laps-sd.adapters" . }}
- name: LAPS_SD_ADAPTERS
  value: {{ . | quote }}
{{- end }}
{{- with include "laps-sd.vllmArgs" . }}
{{- if ne . "{}" }}
- name: LAPS_SD_VLLM_ARGS
  value: {{ . | quote }}
{{- end }}
{{- end }}
{{- if not (hasKey .workers.settings "engineSilenceS") }}
# A round may compile what no round before it needed.
- name: LAPS_SD_ENGINE_SILENCE_S
  value: {{ include "laps-sd.startupSeconds" .workers | int | add 60 | min 86400 | quote }}
{{- end }}
- name: VLLM_CACHE_ROOT
  value: /cache/vllm
- name: HF_HOME
  value: /cache/huggingface
- name: VLLM_NO_USAGE_STATS
  value: "1"
{{- end -}}

{{/* Refusals. Arguments: pool, where. */}}
{{- define "laps-sd.validateVllm" -}}
{{- $workers := .pool.workers -}}
{{- $args := $workers.vllmArgs -}}
{{- $own := or .pool.target.repo .pool.target.path -}}
{{- if and $own (has $workers.engine (list "demo" "fake")) }}
{{- fail (printf "engine of the workers of %s is %s, which serves no target: set engine to auto or vllm, or leave target out." .where $workers.engine) }}
{{- end -}}
{{- if ne $workers.engine "vllm" -}}
{{- if .pool.adapters }}{{ fail (printf "adapters of %s need workers over vLLM, and engine is %s: set workers.engine to vllm." .where $workers.engine) }}{{ end -}}
{{- if $args }}{{ fail (printf "vllmArgs of the workers of %s are arguments of vLLM, and engine is %s: set engine to vllm." .where $workers.engine) }}{{ end -}}
{{- else -}}
{{- if not $own }}{{ fail (printf "engine of the workers of %s is vllm, which needs a model: name target.repo or target.path." .where) }}{{ end -}}
{{- range $name, $instead := include "laps-sd.vllmReserved" . | fromYaml -}}
{{- if hasKey $args $name }}{{ fail (printf "vllmArgs.%s of the workers of %s: %s." $name $.where $instead) }}{{ end -}}
{{- end -}}
{{- if hasKey ($args.speculative_config | default dict) "model" }}{{ fail (printf "vllmArgs.speculative_config.model of the workers of %s: draft names the model, which is then downloaded or found in the volume." .where) }}{{ end -}}
{{- $gpus := include "laps-sd.gpus" $workers | int -}}
{{- $pipeline := $args.pipeline_parallel_size | default 1 | int -}}
{{- $tensor := $args.tensor_parallel_size | default (div (max $gpus 1) $pipeline) | int -}}
{{- if ne (mul $tensor $pipeline) (max $gpus 1 | int64) }}
{{- fail (printf "The workers of %s have %d GPUs and vllmArgs asks for tensor_parallel_size %d times pipeline_parallel_size %d: make the product the number of GPUs, or leave tensor_parallel_size out." .where $gpus $tensor $pipeline) }}
{{- end -}}
{{- end -}}
{{- end -}}
