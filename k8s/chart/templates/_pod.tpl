{{/* Variables from a map of settings: maxDraftLen becomes LAPS_SD_MAX_DRAFT_LEN. Whole numbers are written out: YAML
     makes floats of them, and 1e+06 is no whole number to a service. */}}
{{- define "laps-sd.settings" -}}
{{- range $name, $value := . }}
- name: LAPS_SD_{{ snakecase $name | upper }}
{{- if kindIs "slice" $value }}
  value: {{ join "," $value | quote }}
{{- else if and (kindIs "float64" $value) (eq $value (floor $value)) }}
  value: {{ printf "%.0f" $value | quote }}
{{- else }}
  value: {{ toString $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What the chart decides for every service. Arguments: root, grpcPort, drainSeconds. */}}
{{- define "laps-sd.servingEnv" -}}
- name: LAPS_SD_GRPC_HOST
  value: "::"
- name: LAPS_SD_GRPC_PORT
  value: {{ .grpcPort | quote }}
- name: LAPS_SD_METRICS_PORT
  value: "9090"
- name: LAPS_SD_HEALTH_PORT
  value: "50050"
- name: LAPS_SD_DRAIN_S
  value: {{ .drainSeconds | toString | quote }}
{{- with .root.Values.monitoring.otlpEndpoint }}
- name: LAPS_SD_OTLP_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* How words of prompts are hashed: the same for gateways and schedulers, which compare them. */}}
{{- define "laps-sd.lengthsEnv" -}}
- name: LAPS_SD_PREDICT_LENGTHS
  value: {{ .Values.lengths.predict | quote }}
{{- with .Values.lengths.keySecret }}
- name: LAPS_SD_LENGTH_KEY
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: key}
{{- end }}
{{- end -}}

{{/* With which certificates gateway and worker dial the scheduler. */}}
{{- define "laps-sd.linkEnv" -}}
{{- if ne .Values.tls.links.mode "off" }}
- name: LAPS_SD_LINK_TLS
  value: "true"
- name: LAPS_SD_LINK_TLS_CA
  value: /etc/laps-sd/link-tls/ca.crt
- name: LAPS_SD_LINK_TLS_CERT
  value: /etc/laps-sd/link-tls/tls.crt
- name: LAPS_SD_LINK_TLS_KEY
  value: /etc/laps-sd/link-tls/tls.key
{{- end }}
{{- end -}}

{{/* Secret with the certificate of a component on the links. Arguments: root, component. */}}
{{- define "laps-sd.linkSecret" -}}
{{- if eq .root.Values.tls.links.mode "secrets" -}}
{{ get .root.Values.tls.links.secrets .component }}
{{- else -}}
{{ include "laps-sd.name" (dict "root" .root "pool" nil "component" (printf "%s-link-tls" .component)) }}
{{- end -}}
{{- end -}}

{{/* Which names in certificates may act as what. Nothing: no roles are asked for. */}}
{{- define "laps-sd.clientRoles" -}}
{{- $links := .Values.tls.links -}}
{{- $roles := list -}}
{{- range $role := list "gateway" "worker" "operator" -}}
{{- if and (eq $links.mode "certManager") (or (ne $role "operator") $.Values.operator.enabled) -}}
{{- $roles = append $roles (printf "%s=%s.%s" $role $role $.Release.Namespace) -}}
{{- end -}}
{{- range $name := get $links.roles $role -}}
{{- $roles = append $roles (printf "%s=%s" $role $name) -}}
{{- end -}}
{{- end -}}
{{- join "," $roles -}}
{{- end -}}

{{- define "laps-sd.publicSecret" -}}
{{- if eq .Values.tls.public.mode "secrets" -}}
{{ .Values.tls.public.secret }}
{{- else -}}
{{ include "laps-sd.name" (dict "root" . "pool" nil "component" "public-tls") }}
{{- end -}}
{{- end -}}

{{/* Seconds until Kubernetes may kill: the time before the signal, the drain, and ten to end in. Arguments: values of the
     component (terminationGracePeriodSeconds, drainSeconds, perhaps endpointRemovalSeconds). */}}
{{- define "laps-sd.gracePeriod" -}}
{{- $least := add (ceil .drainSeconds) (.endpointRemovalSeconds | default 0) 10 -}}
{{- .terminationGracePeriodSeconds | default $least | int -}}
{{- end -}}

{{/* Argument: root. */}}
{{- define "laps-sd.podSecurity" -}}
{{- with .Values.podSecurityContext -}}
securityContext: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Argument: root. */}}
{{- define "laps-sd.containerSecurity" -}}
{{- with .Values.containerSecurityContext -}}
securityContext: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* What users add to a list of a component; nothing unless they do. Argument: the list. */}}
{{- define "laps-sd.more" -}}
{{- with . }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/* Health is served on a port of its own: Kubernetes' gRPC probes speak no TLS. Arguments: ready (health name for readiness); perhaps
     started (health name of a start that succeeded), seconds (for the start). */}}
{{- define "laps-sd.probes" -}}
{{- $seconds := .seconds | default 120 | int -}}
{{- $period := ternary 1 5 (le $seconds 120) -}}
startupProbe:
  grpc: {port: 50050, service: {{ .started | default "liveness" }}}
  periodSeconds: {{ $period }}
  failureThreshold: {{ divf $seconds $period | ceil | int }}
livenessProbe:
  grpc: {port: 50050, service: liveness}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  grpc: {port: 50050, service: {{ .ready }}}
  periodSeconds: 2
  timeoutSeconds: 2
{{- end -}}

{{/* "yes" where an autoscaler decides the number of workers. Arguments: root, scaling (values). */}}
{{- define "laps-sd.scaled" -}}
{{- if or .scaling.hpa (include "laps-sd.wanted" (dict "root" .root "mode" .scaling.keda "api" "keda.sh/v1alpha1")) }}yes{{ end -}}
{{- end -}}

{{/* How many of a Deployment. Where a scaler decides, as many as there are: without a number Kubernetes takes one, and an upgrade
     that turns the scaler on would begin by taking the others away. Arguments: root, name, scaled, replicas. */}}
{{- define "laps-sd.replicas" -}}
{{- if not .scaled -}}
replicas: {{ .replicas }}
{{- else -}}
{{- with lookup "apps/v1" "Deployment" .root.Release.Namespace .name -}}
replicas: {{ .spec.replicas }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Where pods go. Arguments: root, pool, component, values of the component. */}}
{{- define "laps-sd.placement" -}}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .values.affinity }}
affinity: {{- toYaml .values.affinity | nindent 2 }}
{{- end }}
{{- if .values.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml .values.topologySpreadConstraints | nindent 2 }}
{{- else if and (not .values.affinity) (has .component (list "gateway" "scheduler" "operator")) }}
topologySpreadConstraints:
  {{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "laps-sd.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
