{{/*
What both charts share: trainer-cluster has it, `make charts` copies it. A component is one workload of a release ("queue",
"trainer", "rollout"). Templates that need one take (dict "root" $ "component" "queue").
*/}}

{{- define "leeway.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "leeway.selector" -}}
app.kubernetes.io/name: leeway
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "leeway.labels" -}}
{{ include "leeway.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* The metadata of an object that belongs to a component and carries its name. */}}
{{- define "leeway.metadata" -}}
name: {{ include "leeway.name" .root }}-{{ .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "leeway.labels" . | nindent 2 }}
{{- end }}

{{/* (dict "root" $ "image" .Values.images.queue) */}}
{{- define "leeway.image" -}}
{{- $registry := .root.Values.images.registry -}}
{{- $name := .image.repository -}}
{{- if $registry }}{{ $name = printf "%s/%s" (trimSuffix "/" $registry) $name }}{{ end -}}
{{- if .image.digest }}{{ printf "%s@%s" $name .image.digest }}
{{- else }}{{ printf "%s:%s" $name (.image.tag | default .root.Chart.AppVersion) }}{{ end -}}
{{- end }}

{{- define "leeway.pod-security" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "leeway.container-security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* The release's own class of a component; none unless priorityClasses.enabled. */}}
{{- define "leeway.priority-class" -}}
{{- if .root.Values.priorityClasses.enabled -}}
{{ .root.Release.Namespace }}-{{ include "leeway.name" .root }}-{{ .component }}
{{- end -}}
{{- end }}

{{/* They belong to the whole cluster: their names say whose they are. */}}
{{- define "leeway.priority-classes" -}}
{{- if .Values.priorityClasses.enabled }}
{{- range $component, $value := omit .Values.priorityClasses "enabled" }}
{{- $own := index $.Values $component | default dict }}
{{- if ne (get $own "enabled" | toString) "false" }}
{{- $at := dict "root" $ "component" $component }}
---
apiVersion: scheduling.k8s.io/v1
kind: PriorityClass
metadata:
  name: {{ include "leeway.priority-class" $at }}
  labels:
    {{- include "leeway.labels" $at | nindent 4 }}
description: The {{ $component }} pods of release {{ $.Release.Name }} in {{ $.Release.Namespace }}.
value: {{ $value }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Where a component may and should run: (dict "root" $ "component" "queue" "values" .Values.queue) */}}
{{- define "leeway.scheduling" -}}
{{- with .values.priorityClassName | default (include "leeway.priority-class" .) }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  {{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "leeway.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}

{{/* What every pod of Leeway has before its containers; "account" is another service account. */}}
{{- define "leeway.pod" -}}
serviceAccountName: {{ .account | default (include "leeway.name" .root) }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- include "leeway.pod-security" . | nindent 2 }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/*
The environment of every process of Leeway. Secrets are in files only. The metrics port also answers
/livez and /readyz.
*/}}
{{- define "leeway.environment" -}}
- name: HOME
  value: /tmp
- name: PYTHONUNBUFFERED
  value: "1"
# The folder /leeway must not pass for the package, wherever a process stands.
- name: PYTHONSAFEPATH
  value: "1"
- name: LEEWAY_CACHE
  value: /leeway/cache
- name: LEEWAY__RUN__DIRECTORY
  value: /leeway/runs
- name: LEEWAY__TELEMETRY__LOG_FORMAT
  value: json
- name: LEEWAY__TELEMETRY__LOG_LEVEL
  value: {{ .root.Values.telemetry.logLevel }}
- name: LEEWAY__TELEMETRY__METRICS_ADDRESS
  value: 0.0.0.0:9100
{{- with .root.Values.telemetry.traces.endpoint }}
- name: LEEWAY__TELEMETRY__TRACES_ENDPOINT
  value: {{ . | quote }}
- name: LEEWAY__TELEMETRY__TRACES_RATIO
  value: {{ $.root.Values.telemetry.traces.ratio | quote }}
{{- end }}
- name: LEEWAY__SECURITY__AUTHORITY
  value: /leeway/tls/ca.crt
{{- end }}

{{- define "leeway.probes" -}}
startupProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
  failureThreshold: {{ div (add 4 .startSeconds) 5 }}
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
  failureThreshold: 3
livenessProbe:
  httpGet: {path: /livez, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ default 3 .silentChecks }}
{{- end }}

{{/* Volumes and mounts that every process has. */}}
{{- define "leeway.mounts" -}}
- {name: config, mountPath: /leeway/config, readOnly: true}
- {name: tls, mountPath: /leeway/tls, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .Values.files }}
- {name: files, mountPath: /leeway/files, readOnly: true}
{{- end }}
{{- end }}

{{- define "leeway.volumes" -}}
- name: config
  configMap:
    name: {{ include "leeway.name" . }}-run
- name: tmp
  emptyDir: {}
{{- if .Values.files }}
- name: files
  configMap:
    name: {{ include "leeway.name" . }}-files
{{- end }}
{{- end }}

{{/* The model: a volume claim that is there already, or a cache that the process fills. */}}
{{- define "leeway.model-mounts" -}}
{{- if .Values.model.claim }}
- {name: model, mountPath: /leeway/model, readOnly: true}
{{- end }}
- {name: cache, mountPath: /leeway/cache}
{{- end }}

{{- define "leeway.model-volumes" -}}
{{- if .Values.model.claim }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .Values.model.claim }}
    readOnly: true
{{- end }}
- name: cache
  emptyDir: {}
{{- end }}

{{/* Makes pods start anew when what they read at start has changed. */}}
{{- define "leeway.checksums" -}}
leeway.dev/run: {{ printf "%s%s" (toJson .Values.run) (toJson .Values.files) | sha256sum | trunc 16 | quote }}
{{- end }}

{{- define "leeway.config-maps" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  {{- include "leeway.metadata" (dict "root" . "component" "run") | nindent 2 }}
data:
  run.yaml: |
    {{- toYaml .Values.run | nindent 4 }}
{{- if .Values.files }}
---
apiVersion: v1
kind: ConfigMap
metadata:
  {{- include "leeway.metadata" (dict "root" . "component" "files") | nindent 2 }}
data:
  {{- range $name, $text := .Values.files }}
  {{ $name | quote }}: {{ $text | quote }}
  {{- end }}
{{- end }}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "leeway.name" . }}
  namespace: {{ .Release.Namespace }}
  labels:
    {{- include "leeway.labels" (dict "root" . "component" "run") | nindent 4 }}
automountServiceAccountToken: false
{{- end }}

{{/* Rules of network policies that recur. */}}
{{- define "leeway.allow-dns" -}}
- to:
    - namespaceSelector: {}
      podSelector:
        matchLabels:
          k8s-app: kube-dns
  ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end }}

{{- define "leeway.allow-traces" -}}
{{- with .Values.telemetry.traces }}
{{- if .endpoint }}
- ports:
    - {port: {{ .port }}, protocol: TCP}
{{- end }}
{{- end }}
{{- end }}

{{- define "leeway.allow-metrics" -}}
{{- with .Values.networkPolicy.metricsFrom }}
- from:
    {{- toYaml . | nindent 4 }}
  ports:
    - {port: metrics, protocol: TCP}
{{- end }}
{{- end }}

{{/* Anything outside of the cluster, over HTTPS. */}}
{{- define "leeway.allow-internet" -}}
{{- if .Values.networkPolicy.internet }}
- to:
    - ipBlock:
        cidr: 0.0.0.0/0
        except: [10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, 169.254.0.0/16]
  ports:
    - {port: 443, protocol: TCP}
{{- end }}
{{- end }}

{{- define "leeway.pod-monitor" -}}
{{- if .Values.monitoring.podMonitor.enabled }}
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
  name: {{ include "leeway.name" . }}
  namespace: {{ .Release.Namespace }}
  labels:
    {{- include "leeway.labels" (dict "root" . "component" "monitoring") | nindent 4 }}
    {{- with .Values.monitoring.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  selector:
    matchLabels:
      app.kubernetes.io/name: leeway
      app.kubernetes.io/instance: {{ .Release.Name | quote }}
  podTargetLabels: [app.kubernetes.io/component]
  podMetricsEndpoints:
    - port: metrics
      interval: {{ .Values.monitoring.podMonitor.interval }}
{{- end }}
{{- end }}

{{/* Resources with a component's GPUs: .Values.trainer or .Values.nodes */}}
{{- define "leeway.gpu-resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .gpus }}
{{- $gpu := dict .gpuResource (toString .gpus) -}}
{{- range $side := list "requests" "limits" }}
{{- $_ := set $resources $side (merge (deepCopy $gpu) (index $resources $side)) -}}
{{- end }}
{{- end }}
{{- toYaml $resources }}
{{- end }}
