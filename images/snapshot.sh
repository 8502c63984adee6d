# Sourced by the build scripts of images made from prepared containers.

fail() { printf '%s image: %s\n' "${name:-service}" "$*" >&2; exit 1; }

# snapshot NAME CONTAINER: copy its file system without its volumes to an image, $snapshot, and make the folder $work.
snapshot() {
    name=$1
    docker info >/dev/null 2>&1 || fail "no Docker engine answers; start one, or say where it is with DOCKER_HOST"
    docker container inspect "$2" >/dev/null 2>&1 ||
        fail "there is no container $2; deploy it once as deployment/$name of the checkout does, or name it: build CONTAINER"
    work=$(mktemp -d)
    trap 'docker image rm --force "${snapshot:-}" >/dev/null 2>&1; rm -rf --one-file-system "$work"' EXIT
    snapshot=decathlon-snapshot-$name:$$
    docker commit "$2" "$snapshot" >/dev/null
    mkdir -p "$work/certificates"
    for bundle in "${PIP_CERT:-}" "${SSL_CERT_FILE:-}" "${REQUESTS_CA_BUNDLE:-}" "${CURL_CA_BUNDLE:-}"; do
        if [ -n "$bundle" ] && [ -f "$bundle" ]; then
            cp -L "$bundle" "$work/certificates/ca-certificates.crt"
            break
        fi
    done
}

# build_from_snapshot NAME IMAGE ARGUMENT...: build $work/Dockerfile.
build_from_snapshot() {
    arguments=(--network host --force-rm --tag "$2" --build-arg "SNAPSHOT=$snapshot")
    if [ -n "${BASE:-}" ]; then arguments+=(--build-arg "BASE=$BASE"); fi
    for variable in HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy; do
        if [ -n "${!variable:-}" ]; then arguments+=(--build-arg "$variable"); fi
    done
    docker build "${arguments[@]}" "${@:3}" "$work" >"$work/log" 2>&1 || { tail -n 40 "$work/log" >&2; fail "docker build failed"; }
    printf '%s image: %s is built, %s MB\n' "$1" "$2" \
        "$(($(docker image inspect --format '{{.Size}}' "$2") / 1000000))" >&2
}
