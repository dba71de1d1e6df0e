{{/* What only this chart knows: the names of its Secrets, and how its parts find each other. */}}

{{/* (dict "root" $ "of" "queue"): the Secret of a component's certificate, or of the tokens. */}}
{{- define "trainer-cluster.secret" -}}
{{- if eq .root.Values.security.certificates "existing" -}}
{{ required (printf "security.secrets.%s: name the Secret, or choose another security.certificates" .of) (index .root.Values.security.secrets .of) }}
{{- else -}}
{{ include "leeway.name" .root }}-{{ .of }}{{ if ne .of "tokens" }}-tls{{ end }}
{{- end -}}
{{- end }}

{{- define "trainer-cluster.redis-url" -}}
{{- with .Values.redis.external -}}
{{- if .url -}}
{{ .url }}{{ if .secret }}{{ contains "?" .url | ternary "&" "?" }}ssl_ca_certs=/leeway/redis/ca.crt{{ end }}
{{- else -}}
rediss://{{ include "leeway.name" $ }}-redis:6379/0?ssl_ca_certs=/leeway/redis/ca.crt
{{- end -}}
{{- end -}}
{{- end }}

{{- define "trainer-cluster.redis-secret" -}}
{{- if .Values.redis.external.url -}}
{{ .Values.redis.external.secret }}
{{- else -}}
{{ include "trainer-cluster.secret" (dict "root" . "of" "redis") }}
{{- end -}}
{{- end }}

{{/* How a process proves who it is: (dict "root" $ "role" "trainer"); the queue has no role. */}}
{{- define "trainer-cluster.security" -}}
- name: LEEWAY__SECURITY__SERVER_NAME
  value: {{ .root.Values.security.serverName }}
- name: LEEWAY__SECURITY__CERTIFICATE
  value: /leeway/tls/tls.crt
- name: LEEWAY__SECURITY__KEY
  value: /leeway/tls/tls.key
{{- if eq .root.Values.security.authentication "tokens" }}
- name: LEEWAY__SECURITY__ACCEPTED_TOKENS
  value: /leeway/tokens
{{- with .role }}
- name: LEEWAY__SECURITY__TOKEN_FILE
  value: /leeway/tokens/{{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "trainer-cluster.security-mounts" -}}
{{- if eq .Values.security.authentication "tokens" }}
- {name: tokens, mountPath: /leeway/tokens, readOnly: true}
{{- end }}
{{- end }}

{{/* (dict "root" $ "of" "queue") */}}
{{- define "trainer-cluster.security-volumes" -}}
- name: tls
  secret:
    secretName: {{ include "trainer-cluster.secret" . }}
    defaultMode: 0440
{{- if eq .root.Values.security.authentication "tokens" }}
- name: tokens
  secret:
    secretName: {{ include "trainer-cluster.secret" (dict "root" .root "of" "tokens") }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{/* The addresses of the two services inside of the cluster. */}}
{{- define "trainer-cluster.addresses" -}}
- name: LEEWAY__QUEUE__ADDRESS
  value: {{ include "leeway.name" . }}-endpoint:7000
- name: LEEWAY__WEIGHTS__ADDRESS
  value: {{ include "trainer-cluster.weights-service" . }}:7001
{{- end }}

{{/* What the servers' certificates say, with commas between. */}}
{{- define "trainer-cluster.server-names" -}}
{{- .Values.security.serverName -}}
{{- if .Values.endpoint.gateway.enabled -}}
{{- range $service := list "queue" "weights" -}}
,{{ required (printf "endpoint.gateway.hosts.%s: give the host name" $service) (index $.Values.endpoint.gateway.hosts $service) }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The label by which a trainer's pods are numbered. */}}
{{- define "trainer-cluster.index-label" -}}
{{- ternary "leaderworkerset.sigs.k8s.io/worker-index" "apps.kubernetes.io/pod-index" .Values.trainer.leaderWorkerSet -}}
{{- end }}

{{/* The Service that has the weights: with many pods the first one has its own. */}}
{{- define "trainer-cluster.weights-service" -}}
{{ include "leeway.name" . }}-endpoint{{ if gt (int .Values.trainer.pods) 1 }}-weights{{ end }}
{{- end }}
