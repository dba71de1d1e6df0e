{{/* What only this chart knows. */}}

{{- define "rollout-cluster.address-port" -}}
{{- $parts := splitList ":" . -}}
{{- last $parts -}}
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
