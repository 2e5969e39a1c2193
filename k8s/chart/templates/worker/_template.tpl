{{/* The pod of a worker: of the Deployment, or of the SpeculativePool that the operator makes it from.
     Arguments: root, pool (with its defaults), shard. */}}
{{- define "laps-sd.workerTemplate" -}}
{{- $root := .root -}}
{{- $pool := .pool -}}
{{- $values := $pool.workers -}}
{{- $self := dict "root" $root "pool" $pool "component" "worker" "shard" .shard "values" $values -}}
{{- $vllm := eq $values.engine "vllm" -}}
{{- $image := include "laps-sd.image" (dict "root" $root "image" $values.image "name" (ternary "laps-sd-worker-vllm" "laps-sd-worker" $vllm)) -}}
{{- $gpu := include "laps-sd.gpus" $values | int -}}
metadata:
  labels:
    {{- include "laps-sd.selector" $self | nindent 4 }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $values.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ $values.serviceAccountName | default (include "laps-sd.name" (dict "root" $root "pool" nil "component" "worker")) }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- include "laps-sd.podSecurity" $root | nindent 2 }}
  terminationGracePeriodSeconds: {{ include "laps-sd.gracePeriod" $values }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $values.schedulerName }}
  schedulerName: {{ . }}
  {{- end }}
  {{- include "laps-sd.placement" $self | nindent 2 }}
  {{- if or $pool.target.repo $pool.draft.repo $values.initContainers }}
  initContainers:
    {{- with $values.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- $roles := list }}
    {{- range $role := list "target" "draft" }}{{ if (get $pool $role).repo }}{{ $roles = append $roles $role }}{{ end }}{{ end }}
    {{- if eq $pool.download "job" }}
    {{- include "laps-sd.awaitModels" (dict "root" $root "pool" $pool "roles" $roles "image" $image) | nindent 4 }}
    {{- else }}
    {{- range $role := $roles }}
    {{- include "laps-sd.download" (dict "root" $root "pool" $pool "role" $role "image" $image "values" $values) | nindent 4 }}
    {{- end }}
    {{- end }}
  {{- end }}
  {{- with $values.resourceClaims }}
  resourceClaims: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: worker
      image: {{ $image }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      env:
        {{- include "laps-sd.servingEnv" (dict "root" $root "grpcPort" 50053 "drainSeconds" $values.drainSeconds) | nindent 8 }}
        - name: LAPS_SD_SCHEDULER_SEEDS_FILE
          value: /etc/laps-sd/schedulers/seeds
        {{- include "laps-sd.linkEnv" $root | nindent 8 }}
        # The scheduler knows the worker by the name of its pod.
        - name: LAPS_SD_WORKER_NAME
          valueFrom:
            fieldRef: {fieldPath: metadata.name}
        - name: LAPS_SD_POOL
          value: {{ $pool.name | quote }}
        {{- if ne $values.engine "auto" }}
        - name: LAPS_SD_ENGINE
          value: {{ $values.engine }}
        {{- end }}
        {{- range $role := list "target" "draft" }}
        {{- with include "laps-sd.modelFolder" (get $pool $role) }}
        - name: LAPS_SD_{{ upper $role }}
          value: /models/{{ . }}
        {{- end }}
        {{- end }}
        {{- if $vllm }}
        {{- include "laps-sd.vllmEnv" $pool | nindent 8 }}
        {{- end }}
        {{- with $pool.contextTokens }}
        - name: LAPS_SD_CONTEXT_TOKENS
          value: {{ int . | quote }}
        {{- end }}
        {{- if and $gpu (not $values.settings.device) }}
        - name: LAPS_SD_DEVICE
          value: cuda
        {{- end }}
        - name: HF_HUB_OFFLINE
          value: "1"
        - name: HOME
          value: {{ ternary "/cache" "/tmp" $vllm }}
        {{- include "laps-sd.settings" $values.settings | nindent 8 }}
        {{- include "laps-sd.more" $values.extraEnv | nindent 8 }}
      ports:
        - {name: health, containerPort: 50050}
        - {name: metrics, containerPort: 9090}
      {{- include "laps-sd.probes" (dict "ready" "readiness" "started" (ternary "engine" "liveness" $vllm) "seconds" (include "laps-sd.startupSeconds" $values)) | nindent 6 }}
      {{- include "laps-sd.containerSecurity" $root | nindent 6 }}
      resources:
        {{- /* A SpeculativePool takes a fraction as a text alone. */}}
        {{- $resources := deepCopy $values.resources }}
        {{- range $side := $resources }}
        {{- range $name, $quantity := $side }}
        {{- if and (kindIs "float64" $quantity) (ne $quantity (floor $quantity)) }}{{ $_ := set $side $name (toString $quantity) }}{{ end }}
        {{- end }}
        {{- end }}
        {{- with $resources }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- with $values.resourceClaims }}
        claims:
          {{- range . }}
          - name: {{ .name | quote }}
          {{- end }}
        {{- end }}
      volumeMounts:
        {{- include "laps-sd.more" $values.extraVolumeMounts | nindent 8 }}
        - {name: tmp, mountPath: /tmp}
        - {name: shared-memory, mountPath: /dev/shm}
        - {name: schedulers, mountPath: /etc/laps-sd/schedulers, readOnly: true}
        {{- if $vllm }}
        - {name: cache, mountPath: /cache}
        {{- end }}
        {{- if or $pool.target.repo $pool.target.path }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if ne $root.Values.tls.links.mode "off" }}
        - {name: link-tls, mountPath: /etc/laps-sd/link-tls, readOnly: true}
        {{- end }}
  volumes:
    {{- include "laps-sd.more" $values.extraVolumes | nindent 4 }}
    - name: tmp
      emptyDir: {}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ include "laps-sd.sharedMemory" $values }}}
    # As a folder: a file in it follows the ConfigMap while the worker runs.
    - name: schedulers
      configMap:
        name: {{ include "laps-sd.name" $self }}-schedulers
    {{- if $vllm }}
    - name: cache
      {{- toYaml $values.cacheVolume | nindent 6 }}
    {{- end }}
    {{- if or $pool.target.repo $pool.target.path }}
    - name: models
      {{- toYaml $pool.modelVolume | nindent 6 }}
    {{- end }}
    {{- if ne $root.Values.tls.links.mode "off" }}
    - name: link-tls
      secret:
        secretName: {{ include "laps-sd.linkSecret" (dict "root" $root "component" "worker") }}
    {{- end }}
{{- end -}}
