{{/* What no schema can say. Each refusal is a sentence: what, why, and what to do. */}}
{{- define "laps-sd.validate" -}}
{{- $root := . -}}
{{- include "laps-sd.validateName" . -}}
{{- $names := list -}}
{{- $shards := list -}}
{{- range $given := .Values.pools -}}
{{- if has $given.name $names }}{{ fail (printf "There are two pools named %q: each needs a name of its own." $given.name) }}{{ end -}}
{{- $names = append $names $given.name -}}
{{- $pool := include "laps-sd.pool" (dict "root" $root "pool" $given) | fromJson -}}
{{- $where := printf "pool %q" $pool.name -}}
{{- include "laps-sd.validatePool" (dict "root" $root "pool" $pool "where" $where) -}}
{{- range $shard := include "laps-sd.shards" (dict "root" $root "pool" $pool) | fromJsonArray -}}
{{- if has $shard.name $shards }}{{ fail (printf "There are two shards named %q in the record: rename a pool." $shard.name) }}{{ end -}}
{{- $shards = append $shards $shard.name -}}
{{- end -}}
{{- end -}}
{{- include "laps-sd.validateGrace" (dict "where" "gateway" "values" .Values.gateway) -}}
{{- include "laps-sd.validateGrace" (dict "where" "scheduler" "values" .Values.scheduler) -}}
{{- if lt (int .Values.gateway.endpointRemovalSeconds) 1 }}
{{- fail "gateway.endpointRemovalSeconds must be at least 1: nodes go on sending calls to a gateway for a moment after it was told to stop, and those would be refused." }}
{{- end -}}
{{- if and .Values.gateway.autoscaling.enabled (gt (int .Values.gateway.autoscaling.minReplicas) (int .Values.gateway.autoscaling.maxReplicas)) }}
{{- fail "gateway.autoscaling.minReplicas must not be larger than maxReplicas." }}
{{- end -}}
{{- if eq (int .Values.gateway.service.port) (int .Values.gateway.service.httpPort) }}
{{- fail (printf "gateway.service.port and gateway.service.httpPort are both %d: a Service has each port once. Give two." (int .Values.gateway.service.port)) }}
{{- end -}}
{{- $scheduler := .Values.scheduler.settings -}}
{{- $lease := $scheduler.leaseS | default 3.0 | float64 -}}
{{- $wait := .Values.gateway.settings.schedulerWaitS | default 30.0 | float64 -}}
{{- if hasKey .Values.gateway.settings "schedulerWaitS" }}{{ $wait = .Values.gateway.settings.schedulerWaitS | float64 }}{{ end -}}
{{- if lt $wait (addf $lease 5.0) }}
{{- fail (printf "gateway.settings.schedulerWaitS (%v s) must be at least scheduler.settings.leaseS (%v s) and 5 seconds: gateways would refuse calls during every change of leader." $wait $lease) }}
{{- end -}}
{{- if and (eq .Values.gateway.anonymous "no") (not .Values.gateway.apiKeysSecret) }}
{{- fail "gateway.anonymous is no and gateway.apiKeysSecret is empty: every call would be refused. Give a secret with tenants.toml, or set gateway.anonymous=auto." }}
{{- end -}}
{{- $redis := .Values.redis -}}
{{- $external := or $redis.external.url $redis.external.existingSecret -}}
{{- if and $redis.bundled.enabled $external }}
{{- fail "redis.bundled.enabled and redis.external exclude each other: which of the two holds the record? Set redis.bundled.enabled=false to use the external one." }}
{{- end -}}
{{- if not (or $redis.bundled.enabled $external) }}
{{- fail "There is no record: give redis.external.url or redis.external.existingSecret, or set redis.bundled.enabled=true." }}
{{- end -}}
{{- if $redis.bundled.enabled -}}
{{- $least := include "laps-sd.recordMemory" $redis.bundled.resources | float64 | mulf 3 -}}
{{- $size := include "laps-sd.bytes" $redis.bundled.storage -}}
{{- if and $redis.bundled.storage (regexMatch "^[0-9]+$" $size) (lt (float64 $size) $least) }}
{{- fail (printf "redis.bundled.storage is %s: the append-only file may hold the record three times while it is written anew, and a full disk stops every request. Give at least %dMi for the memory limit of %v, or a smaller limit." $redis.bundled.storage (divf $least 1048576 | ceil | int64) $redis.bundled.resources.limits.memory) }}
{{- end -}}
{{- end -}}
{{- if and $redis.external.url $redis.external.existingSecret }}
{{- fail "redis.external.url and redis.external.existingSecret exclude each other." }}
{{- end -}}
{{- if regexMatch "^[a-z+]+://[^/]*:[^/@]+@" $redis.external.url }}
{{- fail "redis.external.url has a password in it, which everybody who reads the release would see: put the whole URL into a secret and name it in redis.external.existingSecret." }}
{{- end -}}
{{- if and .Values.networkPolicy.enabled $redis.external.url -}}
{{- $ports := list -}}
{{- range $redis.external.ports }}{{ $ports = append $ports (int .) }}{{ end -}}
{{- $usual := ternary "26379" "6379" (contains "+sentinel://" $redis.external.url) -}}
{{- range splitList "," (regexReplaceAll "^[a-z+]+://([^/@]*@)?|/.*$" $redis.external.url "") -}}
{{- $port := regexFind ":[0-9]+$" . | trimPrefix ":" | default $usual | int -}}
{{- if not (has $port $ports) }}
{{- fail (printf "redis.external.url names the port %d, which the network policy would not let through: add it to redis.external.ports." $port) }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $redis.external.sentinelUser (not $redis.external.sentinelPasswordSecret) }}
{{- fail "redis.external.sentinelUser needs redis.external.sentinelPasswordSecret, with the password of that user." }}
{{- end -}}
{{- include "laps-sd.validateTls" . -}}
{{- include "laps-sd.validateDoors" . -}}
{{- include "laps-sd.validateLosses" . -}}
{{- end -}}

{{- define "laps-sd.validatePool" -}}
{{- $workers := .pool.workers -}}
{{- range .pool.drainingShards -}}
{{- if ge (int .) (int $.pool.shards) }}{{ fail (printf "drainingShards of %s names shard %d, and there are %d: they count from 0." $.where (int .) (int $.pool.shards)) }}{{ end -}}
{{- end -}}
{{- if ge (len .pool.drainingShards) (int .pool.shards) }}
{{- fail (printf "All shards of %s are in drainingShards: no shard would take a request." .where) }}
{{- end -}}
{{- range $name, $volume := dict "modelVolume" .pool.modelVolume "workers.cacheVolume" $workers.cacheVolume -}}
{{- if ne (len $volume) 1 }}
{{- fail (printf "%s of %s has %d volume sources (%s): give one." $name $.where (len $volume) (keys $volume | sortAlpha | join ", ")) }}
{{- end -}}
{{- end -}}
{{- include "laps-sd.validateGrace" (dict "where" (printf "workers of %s" .where) "values" $workers) -}}
{{- range $role := list "target" "draft" -}}
{{- $model := get $.pool $role -}}
{{- if and $model.repo $model.path }}{{ fail (printf "%s of %s has both repo and path: give one." $role $.where) }}{{ end -}}
{{- if and $model.revision (not $model.repo) }}{{ fail (printf "%s.revision of %s needs %s.repo." $role $.where $role) }}{{ end -}}
{{- end -}}
{{- if and (or .pool.draft.repo .pool.draft.path) (not (or .pool.target.repo .pool.target.path)) }}
{{- fail (printf "%s has a draft and no target: the pair needs both." .where) }}
{{- end -}}
{{- if and (or .pool.target.repo .pool.target.path) (eq .pool.model "laps-sd-demo") }}
{{- fail (printf "%s serves a target of its own under the name of the demo model: give it another model name." .where) }}
{{- end -}}
{{- if and (not (or .pool.target.repo .pool.target.path)) (ne .pool.model "laps-sd-demo") }}
{{- fail (printf "%s has no target: name target.repo or target.path for the model %q, or serve the demo pair as \"laps-sd-demo\"." .where .pool.model) }}
{{- end -}}
{{- if and (eq (int $workers.maxSurge) 0) (eq (int $workers.maxUnavailable) 0) }}
{{- fail (printf "maxSurge and maxUnavailable of the workers of %s are both 0: an update could never begin." .where) }}
{{- end -}}
{{- include "laps-sd.validateDownload" (dict "root" .root "pool" .pool "where" .where) -}}
{{- include "laps-sd.validateGpus" (dict "root" .root "values" $workers "where" .where) -}}
{{- include "laps-sd.validateVllm" (dict "pool" .pool "where" .where) -}}
{{- $scaling := $workers.autoscaling -}}
{{- if and $scaling.hpa (ne $scaling.keda "off") }}
{{- fail (printf "autoscaling of %s has both hpa and keda: two autoscalers would fight over the number of workers. Give one." .where) }}
{{- end -}}
{{- if and $scaling.hpa (eq (int $scaling.minReplicas) 0) }}
{{- fail (printf "autoscaling.minReplicas of %s is 0, and a HorizontalPodAutoscaler starts no first worker: give 1 or more, or use KEDA." .where) }}
{{- end -}}
{{- if and (ne $scaling.keda "off") (eq (int $scaling.minReplicas) 0) (gt (int .pool.shards) 1) }}
{{- fail (printf "autoscaling.minReplicas of %s is 0, and it has %d shards: a shard without workers would get no request while another one has a worker, and so never start one again. Give 1 or more, or one shard." .where (int .pool.shards)) }}
{{- end -}}
{{- if and (or $scaling.hpa (ne $scaling.keda "off")) (gt (int $scaling.minReplicas) (int $scaling.maxReplicas)) }}
{{- fail (printf "autoscaling.minReplicas of %s must not be larger than maxReplicas." .where) }}
{{- end -}}
{{- if ne $scaling.keda "off" -}}
{{- if and (ne .root.Values.tls.links.mode "off") (not $scaling.authenticationRef) }}
{{- fail (printf "KEDA cannot dial the scheduler of %s: with tls.links on, name a TriggerAuthentication with a client certificate in autoscaling.authenticationRef." .where) }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Arguments: where, values. */}}
{{- define "laps-sd.validateGrace" -}}
{{- $least := add (ceil .values.drainSeconds) (.values.endpointRemovalSeconds | default 0) 10 -}}
{{- with .values.terminationGracePeriodSeconds -}}
{{- if lt (int .) (int $least) }}
{{- fail (printf "terminationGracePeriodSeconds of the %s is %d: it must be at least %d (the time to drain, what comes before it, and 10 seconds to end in), or Kubernetes kills it with requests on it. Leave it empty, or make drainSeconds smaller." $.where (int .) (int $least)) }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "laps-sd.validateTls" -}}
{{- $links := .Values.tls.links -}}
{{- $public := .Values.tls.public -}}
{{- if eq $links.mode "secrets" -}}
{{- $components := list "scheduler" "gateway" "worker" -}}
{{- if .Values.operator.enabled }}{{ $components = append $components "operator" }}{{ end -}}
{{- range $component := $components -}}
{{- if not (get $links.secrets $component) }}{{ fail (printf "tls.links.mode is secrets: name the one of the %s in tls.links.secrets.%s." $component $component) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if and (eq $links.mode "certManager") (not $links.issuer.name) }}{{ fail "tls.links.mode is certManager: name the issuer in tls.links.issuer.name. It must be one with a CA of its own (a CA issuer), whose ca.crt both ends trust." }}{{ end -}}
{{- $roles := $links.roles -}}
{{- if and (eq $links.mode "secrets") (or $roles.gateway $roles.worker $roles.operator) (not (and $roles.gateway $roles.worker)) }}{{ fail "tls.links.roles gives names to some and not to gateway and worker, whose connections would then be refused: name those in their certificates too." }}{{ end -}}
{{- if and (eq $links.mode "secrets") $roles.gateway (not $roles.operator) .Values.operator.enabled }}{{ fail "tls.links.roles gives names to gateway and worker and not to operator, whose calls would then be refused: name that in its certificate too, since operator.enabled is true." }}{{ end -}}
{{- if and (eq $public.mode "certManager") (not $public.issuer.name) }}{{ fail "tls.public.mode is certManager: name the issuer in tls.public.issuer.name." }}{{ end -}}
{{- if and (eq $public.mode "certManager") (not $public.serviceNames) (not $public.dnsNames) }}{{ fail "tls.public.serviceNames is false and tls.public.dnsNames is empty: a certificate needs a name." }}{{ end -}}
{{- if and (eq $public.mode "secrets") (not $public.secret) }}{{ fail "tls.public.mode is secrets: name the secret (tls.crt, tls.key) in tls.public.secret." }}{{ end -}}
{{- end -}}

{{/* A shortened name could be that of two releases. */}}
{{- define "laps-sd.validateName" -}}
{{- if not .Values.fullnameOverride -}}
{{- $whole := ternary .Release.Name (printf "%s-laps-sd" .Release.Name) (contains "laps-sd" .Release.Name) -}}
{{- if gt (len $whole) 22 }}
{{- fail (printf "The prefix of all names, %q, is longer than 22 characters, and cut off it could be that of another release too: give fullnameOverride, of at most 22 characters. For a release that exists already it is %q." $whole (include "laps-sd.fullname" .)) }}
{{- end -}}
{{- if not (regexMatch "^[a-z][a-z0-9-]*$" $whole) }}
{{- fail (printf "The prefix of all names, %q, begins with a digit or has a dot, which Kubernetes refuses in the name of a Service: give fullnameOverride, or another name to the release." $whole) }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "laps-sd.validateDoors" -}}
{{- $root := . -}}
{{- $gateway := .Values.gateway -}}
{{- $hosts := list -}}
{{- range $given := .Values.pools -}}
{{- $pool := include "laps-sd.pool" (dict "root" $root "pool" $given) | fromJson -}}
{{- range $host := concat ($pool.hosts | default list) ($pool.grpcHosts | default list) -}}
{{- if has $host $hosts }}{{ fail (printf "The host %q is in two lists of hosts and grpcHosts: each leads to one pool, by one protocol." $host) }}{{ end -}}
{{- $hosts = append $hosts $host -}}
{{- end -}}
{{- end -}}
{{- $doors := or $gateway.ingress.enabled $gateway.routes.enabled -}}
{{- if and $doors (not $hosts) }}{{ fail "gateway.ingress or gateway.routes is enabled and no pool has hosts or grpcHosts: name the hosts at which they are reached." }}{{ end -}}
{{- if and $hosts (not $doors) }}{{ fail "A pool has hosts or grpcHosts, and neither gateway.ingress nor gateway.routes is enabled." }}{{ end -}}
{{- if and $gateway.routes.enabled (not $gateway.routes.parentRefs) }}{{ fail "gateway.routes is enabled: name the Gateways in gateway.routes.parentRefs." }}{{ end -}}
{{- if and $gateway.inferencePool.enabled (not $gateway.inferencePool.endpointPicker.name) }}{{ fail "gateway.inferencePool is enabled: name the Service of the endpoint picker in gateway.inferencePool.endpointPicker.name." }}{{ end -}}
{{- end -}}
