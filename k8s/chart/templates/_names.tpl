{{/* Prefix of all names. At most 22 characters, so that a StatefulSet's name stays below 52 and its labels below 63. */}}
{{- define "laps-sd.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains "laps-sd" .Release.Name -}}
{{- .Release.Name | trunc 22 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-laps-sd" .Release.Name | trunc 22 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Arguments: root, pool (or nil), component; perhaps shard (see laps-sd.shards). */}}
{{- define "laps-sd.name" -}}
{{- $prefix := include "laps-sd.fullname" .root -}}
{{- if .pool }}{{ printf "%s-%s-%s" $prefix .pool.name .component }}{{ else }}{{ printf "%s-%s" $prefix .component }}{{ end -}}
{{- with .shard }}{{ .suffix }}{{ end -}}
{{- end -}}

{{/* The shards of a pool, as JSON: name (in keys and request ids), suffix of resources' names, draining. The first one is named
     as the pool, so that a second one changes nothing of it. Arguments: root, pool (with its defaults). */}}
{{- define "laps-sd.shards" -}}
{{- $shards := list -}}
{{- range $i := until (int .pool.shards) -}}
{{- $suffix := ternary "" (printf "-s%d" $i) (eq $i 0) -}}
{{- $draining := false -}}
{{- range $.pool.drainingShards }}{{ if eq (int .) $i }}{{ $draining = true }}{{ end }}{{ end -}}
{{- $shards = append $shards (dict "name" (printf "%s%s" $.pool.name $suffix) "suffix" $suffix "draining" $draining) -}}
{{- end -}}
{{- toJson $shards -}}
{{- end -}}

{{/* What selects the pods of a component. Arguments: root, pool (or nil), component; perhaps shard. */}}
{{- define "laps-sd.selector" -}}
app.kubernetes.io/name: laps-sd
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- if .pool }}
laps-sd.dev/pool: {{ .pool.name | quote }}
{{- end }}
{{- with .shard }}
laps-sd.dev/shard: {{ .name | quote }}
{{- end }}
{{- end -}}

{{/* Of objects. Pods have those of the selector alone: the others change with each version of the chart, and a changed pod template
     restarts every pod. */}}
{{- define "laps-sd.labels" -}}
{{ include "laps-sd.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | replace "+" "_" | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Annotations of an object. Arguments: root; perhaps own (map). */}}
{{- define "laps-sd.annotations" -}}
{{- with merge (deepCopy (.own | default dict)) .root.Values.commonAnnotations -}}
annotations: {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* Arguments: root, image ("name:tag" or empty), name. */}}
{{- define "laps-sd.image" -}}
{{- $tag := .root.Values.image.tag | default (.root.Chart.AppVersion | replace "+" "_") -}}
{{ .root.Values.image.registry }}{{ .image | default (printf "%s:%s" .name $tag) }}
{{- end -}}

{{/* One pool with its defaults, as JSON. A volume is replaced, everything else is overlaid. Arguments: root, pool. */}}
{{- define "laps-sd.pool" -}}
{{- $whole := deepCopy .root.Values.poolDefaults -}}
{{- if .pool.modelVolume }}{{ $_ := set $whole "modelVolume" (dict) }}{{ end -}}
{{- if (.pool.workers | default dict).cacheVolume }}{{ $_ := set $whole.workers "cacheVolume" (dict) }}{{ end -}}
{{- include "laps-sd.overlay" (list $whole .pool) -}}
{{- $_ := set $whole "modelVolume" (include "laps-sd.volume" $whole.modelVolume | fromJson) -}}
{{- $_ := set $whole.workers "cacheVolume" (include "laps-sd.volume" $whole.workers.cacheVolume | fromJson) -}}
{{- toJson $whole -}}
{{- end -}}

{{/* A volume source as JSON, without the emptyDir of values.yaml that Helm merges with another one. */}}
{{- define "laps-sd.volume" -}}
{{- if gt (len .) 1 }}{{ toJson (omit . "emptyDir") }}{{ else }}{{ toJson . }}{{ end -}}
{{- end -}}

{{/* Changes the first map: sprig's own merge takes 0 and false for "not given". */}}
{{- define "laps-sd.overlay" -}}
{{- $under := index . 0 -}}
{{- range $key, $value := index . 1 -}}
{{- if and (kindIs "map" $value) (kindIs "map" (get $under $key)) -}}
{{- include "laps-sd.overlay" (list (get $under $key) $value) -}}
{{- else -}}
{{- $_ := set $under $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* "yes" where an off/on/auto value means that objects of the API version are wanted. Arguments: root, mode, api. */}}
{{- define "laps-sd.wanted" -}}
{{- if or (eq .mode "on") (and (eq .mode "auto") (.root.Capabilities.APIVersions.Has .api)) }}yes{{ end -}}
{{- end -}}

{{/* host:port,host:port of all schedulers of a shard. Arguments: root, pool, shard. */}}
{{- define "laps-sd.seeds" -}}
{{- $root := .root -}}
{{- $name := include "laps-sd.name" (dict "root" $root "pool" .pool "component" "scheduler" "shard" .shard) -}}
{{- $seeds := list -}}
{{- range $i := until (int $root.Values.scheduler.replicas) -}}
{{- $seeds = append $seeds (printf "%s-%d.%s-peers.%s.svc.%s:50052" $name $i $name $root.Release.Namespace $root.Values.clusterDomain) -}}
{{- end -}}
{{- join "," $seeds -}}
{{- end -}}

{{/* Secret with the password of the bundled record. */}}
{{- define "laps-sd.redisSecret" -}}
{{- if .Values.redis.bundled.enabled -}}
{{ .Values.redis.bundled.existingSecret | default (include "laps-sd.name" (dict "root" . "pool" nil "component" "redis")) }}
{{- end -}}
{{- end -}}

{{/* "yes" where `helm test` can call: no key is needed, or there is one. */}}
{{- define "laps-sd.tested" -}}
{{- if or .Values.test.apiKeySecret (eq (include "laps-sd.anonymous" .) "yes") }}yes{{ end -}}
{{- end -}}

{{/* The name in the gateways' certificate by which callers are to check it; empty: the one that they dial. */}}
{{- define "laps-sd.publicName" -}}
{{- $public := .Values.tls.public -}}
{{- if or (eq $public.mode "secrets") (not $public.serviceNames) }}{{ with $public.dnsNames }}{{ first . }}{{ end }}{{ end -}}
{{- end -}}

{{/* Whether callers without a key are served: "yes" or "no". */}}
{{- define "laps-sd.anonymous" -}}
{{- if eq .Values.gateway.anonymous "auto" -}}
{{ ternary "no" "yes" (ne .Values.gateway.apiKeysSecret "") }}
{{- else -}}
{{ .Values.gateway.anonymous }}
{{- end -}}
{{- end -}}

{{/* Bytes of data that the bundled record may hold: 60 % of its memory limit. The rest is for what a rewrite of the append-only file copies, for
     clients' buffers and fragmentation. Full, it refuses writes, which the scheduler reports; beyond the limit it would be killed. 0 (no bound)
     without a limit. */}}
{{- define "laps-sd.recordMemory" -}}
{{- $limit := dig "limits" "memory" "" . | toString -}}
{{- $bytes := include "laps-sd.bytes" $limit -}}
{{- if not (regexMatch "^[0-9]+$" $bytes) -}}
{{- fail (printf "redis.bundled.resources.limits.memory is %q: give it in bytes or with one of the units k, M, G, T, Ki, Mi, Gi, Ti" $limit) -}}
{{- end -}}
{{- $bytes | float64 | mulf 0.6 | floor | int64 -}}
{{- end -}}

{{/* Whole bytes of a quantity; one with another unit as it is. Kubernetes stores quantities in another form than it gets: 1024Mi as 1Gi. */}}
{{- define "laps-sd.bytes" -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := regexFind "[A-Za-z]*$" . -}}
{{- if hasKey $units $unit }}{{ trimSuffix $unit . | float64 | mulf (get $units $unit) | floor | int64 }}{{ else }}{{ . }}{{ end -}}
{{- end -}}
