{{/* Refusals of upgrades that would leave requests behind or could not end, by what is in the cluster. Without a cluster (`helm template`, Argo CD) nothing is found and
     nothing refused: docs/kubernetes.md says what each of them loses. `acceptLosses` names those that are meant. */}}

{{- define "laps-sd.validateLosses" -}}
{{- $ours := list -}}
{{- range $one := (lookup "apps/v1" "StatefulSet" .Release.Namespace "").items | default list -}}
{{- $labels := $one.metadata.labels | default dict -}}
{{- if and (eq (get $labels "app.kubernetes.io/name") "laps-sd") (eq (get $labels "app.kubernetes.io/instance") $.Release.Name) }}{{ $ours = append $ours $one }}{{ end -}}
{{- end -}}
{{- include "laps-sd.validateShards" (dict "root" . "found" $ours) -}}
{{- include "laps-sd.validateRecord" (dict "root" . "found" $ours) -}}
{{- include "laps-sd.validateClaim" . -}}
{{- include "laps-sd.validatePairs" . -}}
{{- end -}}

{{/* Every shard that has schedulers in the cluster is still wanted, or has been draining. Arguments: root, found (the release's StatefulSets). */}}
{{- define "laps-sd.validateShards" -}}
{{- $root := .root -}}
{{- $wanted := list -}}
{{- $pools := list -}}
{{- range $given := $root.Values.pools -}}
{{- $pool := include "laps-sd.pool" (dict "root" $root "pool" $given) | fromJson -}}
{{- $pools = append $pools $pool.name -}}
{{- range $shard := include "laps-sd.shards" (dict "root" $root "pool" $pool) | fromJsonArray }}{{ $wanted = append $wanted $shard.name }}{{ end -}}
{{- end -}}
{{- range $one := .found -}}
{{- $labels := $one.metadata.labels -}}
{{- $ours := eq (get $labels "app.kubernetes.io/component") "scheduler" -}}
{{- $shard := get $labels "laps-sd.dev/shard" -}}
{{- $pool := get $labels "laps-sd.dev/pool" -}}
{{- if and $ours $shard (not (has $shard $wanted)) -}}
{{- if not (has $pool $pools) -}}
{{- if not (has (printf "pool/%s" $pool) $root.Values.acceptLosses) -}}
{{- fail (printf "The pool %q is in the release and not in the values. Its unfinished requests would stay in the record with no scheduler, and its results could not be read. To rename a pool is to remove it and add another. Stop its traffic, wait until `laps-sd queue` shows no request, and set acceptLosses=[pool/%s]." $pool $pool) -}}
{{- end -}}
{{- else if not (has (printf "shard/%s" $shard) $root.Values.acceptLosses) -}}
{{- $file := dig "data" "shards" "" (lookup "v1" "ConfigMap" $root.Release.Namespace (include "laps-sd.name" (dict "root" $root "pool" (dict "name" $pool) "component" "gateway") | printf "%s-shards")) -}}
{{- if not (regexMatch (printf "(?m)^%s [^ ]+ draining$" $shard) $file) -}}
{{- fail (printf "The shard %q would be removed without having drained: its unfinished requests would stay in the record with no scheduler. Add its number to drainingShards of pool %q first, wait until `laps-sd queue` shows no request of it, and remove it then; or set acceptLosses=[shard/%s]." $shard $pool $shard) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Where the record is, in words without a secret. */}}
{{- define "laps-sd.recordPlace" -}}
{{- if .Values.redis.bundled.enabled -}}bundled
{{- else if .Values.redis.external.existingSecret -}}secret {{ .Values.redis.external.existingSecret }}
{{- else -}}{{ .Values.redis.external.url }}
{{- end -}}
{{- end -}}

{{/* Arguments as above. */}}
{{- define "laps-sd.validateRecord" -}}
{{- $root := .root -}}
{{- $place := include "laps-sd.recordPlace" $root -}}
{{- $name := include "laps-sd.name" (dict "root" $root "pool" nil "component" "redis") -}}
{{- range $one := .found -}}
{{- $component := get $one.metadata.labels "app.kubernetes.io/component" -}}
{{- $before := ternary "bundled" (dig "metadata" "annotations" "laps-sd.dev/record" "" $one) (eq $component "redis") -}}
{{- if and $before (ne $before $place) (not (has "record" $root.Values.acceptLosses)) -}}
{{- fail (printf "The record would change from %q to %q: the schedulers would find none of the unfinished requests and results of the old one%s. If the new one has the same content, or all requests have ended, set acceptLosses=[record]." $before $place (ternary ", whose server this upgrade removes" "" (eq $before "bundled"))) -}}
{{- end -}}
{{- if and (eq $component "redis") $root.Values.redis.bundled.enabled (ne $one.metadata.name $name) (not (has "record" $root.Values.acceptLosses)) -}}
{{- fail (printf "The bundled record would move from %q to %q, a server without data: the schedulers would find none of the unfinished requests and results of the old one, which this upgrade removes. Keep the name with fullnameOverride=%s. If the new one has the same content, or all requests have ended, set acceptLosses=[record]." $one.metadata.name $name ($one.metadata.name | trimSuffix "-redis")) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Kubernetes refuses to change the claims of a StatefulSet, after Helm has changed everything else. */}}
{{- define "laps-sd.validateClaim" -}}
{{- if .Values.redis.bundled.enabled -}}
{{- $wanted := .Values.redis.bundled -}}
{{- $name := include "laps-sd.name" (dict "root" . "pool" nil "component" "redis") -}}
{{- with lookup "apps/v1" "StatefulSet" .Release.Namespace $name -}}
{{- $claim := .spec.volumeClaimTemplates | default list | first | default dict -}}
{{- $size := dig "spec" "resources" "requests" "storage" "" $claim -}}
{{- $class := dig "spec" "storageClassName" "" $claim -}}
{{- if or (ne (include "laps-sd.bytes" $size) (include "laps-sd.bytes" $wanted.storage)) (and $size (ne $class $wanted.storageClassName)) -}}
{{- fail (printf "redis.bundled.storage and storageClassName (%q, %q) differ from those of the StatefulSet %s (%q, %q), which Kubernetes does not change. For a larger claim, resize it (kubectl -n %s patch pvc data-%s-0), then delete the StatefulSet and keep its pod (kubectl -n %s delete statefulset %s --cascade=orphan), and upgrade again." $wanted.storage $wanted.storageClassName $name $size $class $.Release.Namespace $name $.Release.Namespace $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Schedulers refuse workers of another model pair while those of the first run, so a rolling update would stop at its first pod.
     The operator's Deployments have the same names as Helm's. */}}
{{- define "laps-sd.validatePairs" -}}
{{- range $given := .Values.pools -}}
{{- $pool := include "laps-sd.pool" (dict "root" $ "pool" $given) | fromJson -}}
{{- range $shard := include "laps-sd.shards" (dict "root" $ "pool" $pool) | fromJsonArray -}}
{{- $name := include "laps-sd.name" (dict "root" $ "pool" $pool "component" "worker" "shard" $shard) -}}
{{- with lookup "apps/v1" "Deployment" $.Release.Namespace $name -}}
{{- $runs := or (int (dig "spec" "replicas" 1 .)) (int (dig "status" "replicas" 0 .)) -}}
{{- if and $runs (not (has (printf "pair/%s" $pool.name) $.Values.acceptLosses)) -}}
{{- $new := include "laps-sd.workerTemplate" (dict "root" $ "pool" $pool "shard" $shard) | fromYaml -}}
{{- $before := include "laps-sd.pairOf" .spec.template.spec | fromJson -}}
{{- range $part, $wanted := include "laps-sd.pairOf" $new.spec | fromJson -}}
{{- $found := get $before $part -}}
{{- if ne $found $wanted -}}
{{- fail (printf "The workers of pool %q would get another model pair (%s from %s to %s), which its schedulers refuse while workers of the first run: the update would stop at its first pod. Add a pool with the new values and remove this one later; or keep callers away, wait until `laps-sd queue` shows no request, scale the workers to 0 and upgrade then (see \"What a rolling update cannot change\" in docs/kubernetes.md). To begin the update all the same, set acceptLosses=[pair/%s]." $pool.name $part ($found | default "none") ($wanted | default "none") $pool.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What a worker's pod shows of its fingerprint, as JSON. The version in an image and the files of a path are not in it. Argument: spec of the pod. */}}
{{- define "laps-sd.pairOf" -}}
{{- $found := dict "LAPS_SD_ENGINE" "auto" "LAPS_SD_TARGET" "" "LAPS_SD_DRAFT" "" "LAPS_SD_DTYPE" "auto" "LAPS_SD_QUANTIZATION" "none" "LAPS_SD_DETERMINISTIC" "" "LAPS_SD_VLLM_SAMPLING" "coupled" "LAPS_SD_ADAPTERS" "" -}}
{{- $args := dict -}}
{{- range $container := .containers -}}
{{- range $container.env -}}
{{- if hasKey $found .name }}{{ $_ := set $found .name (.value | default "") }}{{ end -}}
{{- if eq .name "LAPS_SD_VLLM_ARGS" }}{{ $args = .value | default "{}" | fromJson }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if $args.speculative_config }}{{ $_ := set $args "speculative_config" (pick $args.speculative_config "method" "model" "num_speculative_tokens") }}{{ end -}}
{{- range $name := list "quantization" "kv_cache_dtype" "hf_overrides" "tensor_parallel_size" "pipeline_parallel_size" "speculative_config" -}}
{{- $_ := set $found (printf "vllmArgs.%s" $name) (hasKey $args $name | ternary (get $args $name | toJson) "") -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}
