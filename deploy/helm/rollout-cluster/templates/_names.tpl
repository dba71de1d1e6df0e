{{/* What only this chart knows. */}}

{{- define "rollout-cluster.address-port" -}}
{{- $parts := splitList ":" . -}}
{{- last $parts -}}
{{- end }}

{{/* What a node, and whoever checks for it, knows of the sandboxes: all that the name stands for. */}}
{{- define "rollout-cluster.sandboxes" -}}
{{- if .Values.sandbox.enabled }}
- name: LEEWAY__ROLLOUT__SANDBOX__ADDRESS
  value: {{ include "leeway.name" . }}-sandbox.{{ .Release.Namespace }}.svc:7003
{{- if eq .Values.security.authentication "tokens" }}
- name: LEEWAY__ROLLOUT__SANDBOX__TOKEN_FILE
  value: /leeway/tls/sandbox-client
{{- end }}
{{- end }}
{{- end }}

{{/* Where the trainer cluster is, and how a node proves that it may come. */}}
{{- define "rollout-cluster.connection" -}}
- name: LEEWAY__QUEUE__ADDRESS
  value: {{ required "trainerCluster.queue: give the trainer cluster's endpoint, host:7000" .Values.trainerCluster.queue | quote }}
- name: LEEWAY__WEIGHTS__ADDRESS
  value: {{ required "trainerCluster.weights: give the trainer cluster's endpoint, host:7001" .Values.trainerCluster.weights | quote }}
{{- with .Values.security.serverName }}
- name: LEEWAY__SECURITY__SERVER_NAME
  value: {{ . }}
{{- end }}
{{- if eq .Values.security.authentication "tokens" }}
- name: LEEWAY__SECURITY__TOKEN_FILE
  value: /leeway/tls/rollout
{{- else }}
- name: LEEWAY__SECURITY__CERTIFICATE
  value: /leeway/tls/tls.crt
- name: LEEWAY__SECURITY__KEY
  value: /leeway/tls/tls.key
{{- end }}
{{- end }}

{{- define "rollout-cluster.tls-volume" -}}
- name: tls
  secret:
    secretName: {{ .Values.security.secret }}
    defaultMode: 0440
{{- end }}

{{/* A node needs minutes until it helps, and one too few costs the trainer's time. */}}
{{- define "rollout-cluster.scaling" -}}
scaleUp:
  stabilizationWindowSeconds: 60
  policies: [{type: Percent, value: 50, periodSeconds: 120}, {type: Pods, value: 1, periodSeconds: 120}]
scaleDown:
  stabilizationWindowSeconds: 1800
  policies: [{type: Pods, value: 1, periodSeconds: 600}]
{{- end }}
