{{/* GPUs of workers: by a resource of a device plugin, or by claims. */}}

{{/* Resources that count GPUs, as JSON. Argument: values of the workers. */}}
{{- define "laps-sd.gpuResources" -}}
{{- $found := list -}}
{{- range $name := keys (.resources.limits | default dict) | sortAlpha -}}
{{- if or (eq $.gpuResource $name) (and (not $.gpuResource) (regexMatch "^(nvidia|amd)[.]com/(gpu|mig-)" $name)) }}{{ $found = append $found $name }}{{ end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{/* Number of GPUs of a worker. Argument: values of the workers. */}}
{{- define "laps-sd.gpus" -}}
{{- $gpus := ternary (int .claimedGpus) 0 (not (empty .resourceClaims)) -}}
{{- range $name := include "laps-sd.gpuResources" . | fromJsonArray }}{{ $gpus = add $gpus (get $.resources.limits $name | int) }}{{ end -}}
{{- $gpus -}}
{{- end -}}

{{/* Refusals. Arguments: root, values of the workers, where. */}}
{{- define "laps-sd.validateGpus" -}}
{{- $values := .values -}}
{{- $found := include "laps-sd.gpuResources" $values | fromJsonArray -}}
{{- $gpus := include "laps-sd.gpus" $values | int -}}
{{- if gt (len $found) 1 }}
{{- fail (printf "resources.limits of the workers of %s has several kinds of GPUs (%s), and a worker computes on one kind: give one, or name the one that counts in gpuResource." .where (join ", " $found)) }}
{{- end -}}
{{- if and $values.gpuResource (not $found) }}
{{- fail (printf "gpuResource of the workers of %s is %s, and resources.limits does not have it." .where $values.gpuResource) }}
{{- end -}}
{{- if and $found $values.resourceClaims }}
{{- fail (printf "The workers of %s get GPUs twice: by resources.limits (%s) and by resourceClaims. Give one." .where (first $found)) }}
{{- end -}}
{{- /* Any other API server accepts the pods and leaves the claims out. */ -}}
{{- $capable := .root.Capabilities -}}
{{- if and $values.resourceClaims (semverCompare "<1.34.0-0" $capable.KubeVersion.Version) (not ($capable.APIVersions.Has "resource.k8s.io/v1beta1")) }}
{{- fail (printf "resourceClaims of the workers of %s need Kubernetes 1.34, or 1.32 with the API resource.k8s.io/v1beta1. This is %s without it, which would start the workers without GPUs: give a resource in resources.limits. (Without a cluster, helm template has --kube-version and --api-versions.)" .where $capable.KubeVersion.Version) }}
{{- end -}}
{{- if and (gt $gpus 1) (ne $values.engine "vllm") }}
{{- fail (printf "The workers of %s have %d GPUs, and engine %s computes on one: the others would stay idle. Set engine to vllm, or more replicas with one GPU each." .where $gpus $values.engine) }}
{{- end -}}
{{- if and (gt $gpus 1) (hasPrefix "nvidia.com/mig-" (first (append $found ""))) }}
{{- fail (printf "The workers of %s have %d parts of GPUs (%s), which cannot compute together: give each worker one." .where $gpus (first $found)) }}
{{- end -}}
{{- if and $gpus (eq ($values.settings.device | default "cuda") "cpu") }}
{{- fail (printf "The workers of %s ask for a GPU and settings.device says cpu." .where) }}
{{- end -}}
{{- if and (not $gpus) (hasPrefix "cuda" ($values.settings.device | default "cpu")) }}
{{- fail (printf "settings.device of the workers of %s is %s and no GPU is asked for: add a resource such as resources.limits.\"nvidia.com/gpu\", or resourceClaims." .where $values.settings.device) }}
{{- end -}}
{{- end -}}
