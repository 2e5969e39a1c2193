{{/* Models with a `repo`: each pod downloads them, or one Job does. */}}

{{/* Init container that downloads one model of the pair. Arguments: root, pool, role (target, draft), image, values (of the
     component, whose additions it gets too), only (files, or empty for all but weights that the engine does not read: drafts
     of vLLM are often published as pytorch_model.bin alone). */}}
{{- define "laps-sd.download" -}}
{{- $model := get .pool .role -}}
- name: {{ .role }}-download
  image: {{ .image }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  # The first process of a container gets only signals that it handles: without the trap a pod that is deleted while it
  # downloads stays until its grace period is over.
  command: [sh, -c, 'trap "exit 143" TERM; "$@" & wait $!', sh]
  args:
    - hf
    - download
    - {{ $model.repo | quote }}
    {{- if .only }}
    {{- range .only }}
    - {{ . }}
    {{- end }}
    {{- else }}
    {{- if not (and (eq .role "draft") (eq .pool.workers.engine "vllm")) }}
    - --exclude
    - "*.bin"
    {{- end }}
    - --exclude
    - "*.pth"
    - --exclude
    - "original/*"
    {{- end }}
    {{- with $model.revision }}
    - --revision
    - {{ . | quote }}
    {{- end }}
    - --local-dir
    - /models/{{ include "laps-sd.modelFolder" $model }}
  env:
    - name: HF_HOME
      value: /tmp/huggingface
    {{- with .pool.huggingFaceEndpoint }}
    - name: HF_ENDPOINT
      value: {{ . | quote }}
    {{- end }}
    {{- with .pool.huggingFaceTokenSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ . }}, key: token}
    {{- end }}
    {{- include "laps-sd.more" .values.extraEnv | nindent 4 }}
  {{- include "laps-sd.containerSecurity" .root | nindent 2 }}
  resources:
    requests: {cpu: 100m, memory: 256Mi}
    limits: {memory: 2Gi}
  volumeMounts:
    {{- include "laps-sd.more" .values.extraVolumeMounts | nindent 4 }}
    - {name: models, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
{{- end -}}

{{/* Folder of a model below /models. Argument: {repo, revision} or {path}. */}}
{{- define "laps-sd.modelFolder" -}}
{{- if .path }}{{ .path }}{{ else if .repo }}{{ .repo | replace "/" "--" }}{{ with .revision }}-{{ . }}{{ end }}{{ end -}}
{{- end -}}

{{/* File that the Job writes when a model is whole. Argument: {repo, revision}. */}}
{{- define "laps-sd.modelWhole" -}}
/models/.laps-sd-{{ include "laps-sd.modelFolder" . }}-is-whole
{{- end -}}

{{/* Init container that waits until the Job has downloaded. Arguments: root, roles (of the models), pool, image. */}}
{{- define "laps-sd.awaitModels" -}}
- name: await-models
  image: {{ .image }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command:
    - sh
    - -c
    - |
      trap 'exit 143' TERM
      {{- range $role := .roles }}
      {{- $model := get $.pool $role }}
      until [ -e {{ include "laps-sd.modelWhole" $model }} ]; do echo 'the Job has not downloaded {{ $model.repo }} yet'; sleep 10 & wait $!; done
      {{- end }}
  {{- include "laps-sd.containerSecurity" .root | nindent 2 }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    - {name: models, mountPath: /models, readOnly: true}
{{- end -}}

{{/* The pod of the Job that downloads the models of a pool. Arguments: root, pool (with its defaults), component. */}}
{{- define "laps-sd.modelsTemplate" -}}
{{- $gateway := .root.Values.gateway -}}
{{- $image := include "laps-sd.image" (dict "root" .root "image" $gateway.image "name" "laps-sd-gateway") -}}
{{- $roles := list -}}
{{- range $role := list "target" "draft" }}{{ if (get $.pool $role).repo }}{{ $roles = append $roles $role }}{{ end }}{{ end -}}
metadata:
  labels: {{- include "laps-sd.selector" . | nindent 4 }}
spec:
  restartPolicy: OnFailure
  serviceAccountName: {{ include "laps-sd.name" (dict "root" .root "pool" nil "component" "gateway") }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- include "laps-sd.podSecurity" .root | nindent 2 }}
  {{- with $gateway.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $gateway.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  initContainers:
    {{- range $role := $roles }}
    {{- include "laps-sd.download" (dict "root" $.root "pool" $.pool "role" $role "image" $image "values" $gateway) | nindent 4 }}
    {{- end }}
  containers:
    - name: whole
      image: {{ $image }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      command:
        - touch
        {{- range $role := $roles }}
        - {{ include "laps-sd.modelWhole" (get $.pool $role) }}
        {{- end }}
      {{- include "laps-sd.containerSecurity" .root | nindent 6 }}
      resources:
        requests: {cpu: 10m, memory: 16Mi}
        limits: {memory: 64Mi}
      volumeMounts:
        - {name: models, mountPath: /models}
  volumes:
    {{- include "laps-sd.more" $gateway.extraVolumes | nindent 4 }}
    - name: tmp
      emptyDir: {}
    - name: models
      {{- toYaml .pool.modelVolume | nindent 6 }}
{{- end -}}

{{/* Refusals. Arguments: root, pool, where. */}}
{{- define "laps-sd.validateDownload" -}}
{{- $some := false -}}
{{- $endsWithPod := or (hasKey .pool.modelVolume "emptyDir") (hasKey .pool.modelVolume "ephemeral") -}}
{{- range $role := list "target" "draft" -}}
{{- $model := get $.pool $role -}}
{{- if $model.repo -}}
{{- $some = true -}}
{{- if not (or $endsWithPod (regexMatch "^[0-9a-f]{40}$" ($model.revision | default ""))) }}
{{- fail (printf "%s.revision of %s must be a commit (40 hexadecimal digits), since modelVolume outlives its pods: of a branch or a tag, part of a download counts as the whole while the Hub cannot be reached, and its files may change under running workers. This prints the newest one: hf models info %s --expand sha" $role $.where $model.repo) }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq .pool.download "job" -}}
{{- if not $some }}{{ fail (printf "download of %s is job, and neither target nor draft has a repo to download." .where) }}{{ end -}}
{{- if not .pool.modelVolume.persistentVolumeClaim }}{{ fail (printf "download of %s is job, which fills a claim that all pods mount: give modelVolume.persistentVolumeClaim." .where) }}{{ end -}}
{{- end -}}
{{- end -}}
