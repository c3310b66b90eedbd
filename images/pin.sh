#!/bin/sh
# Adds to each base image of the Dockerfile and of docker-compose.yml the digest that its tag has now: `make pin`.
# It asks the images' registry, through docker (buildx) or skopeo. Run it again for newer images.
set -eu
cd "$(dirname "$0")/.."
digest() {
  if command -v skopeo >/dev/null; then
    skopeo inspect --no-tags --format '{{.Digest}}' "docker://$1"
  else
    docker buildx imagetools inspect "$1" --format '{{.Manifest.Digest}}'
  fi
}
for file in Dockerfile docker-compose.yml; do
  # NAME:TAG or NAME:TAG@DIGEST, after `ARG ..._IMAGE=` or in `${..._IMAGE:-...}`
  for image in $(sed -n -e 's/^ARG [A-Z]*_IMAGE=\([^@]*\).*/\1/p' -e 's/.*_IMAGE:-\([^@}]*\).*/\1/p' "$file"); do
    found=$(digest "$image")
    case $found in sha256:*) ;; *) echo "no digest for $image: $found" >&2; exit 1 ;; esac
    sed -i.before -e "s|\(_IMAGE[=:-]*\)$image\(@sha256:[0-9a-f]*\)\{0,1\}|\1$image@$found|" "$file"
    rm "$file.before"
    echo "$file: $image@$found"
  done
done
