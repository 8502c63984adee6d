# What toolathlon_gym's evaluators and preprocess scripts import, at its paths, and its server `filesystem`, in upstream's
# version of Toolathlon: what `python -m tools.fidelity` plays of it. Its own image builds all servers of the checkout.
#
#   docker build --network host --tag decathlon-fidelity-gym:latest \
#       --file tools/fidelity/gym.Dockerfile tools/fidelity
ARG BASE=decathlon-fidelity:latest
FROM ${BASE}
RUN set -eu; \
    export UV_PYTHON=3.13 UV_OFFLINE=0; \
    uv --no-config venv --clear /opt/venv; \
    uv --no-config pip install --python /opt/venv/bin/python3 addict arxiv bibtexparser openpyxl prompt-toolkit \
        psutil psycopg2-binary python-docx python-pptx pyyaml termcolor; \
    uv cache clean; \
    mkdir -p /opt/local_servers/filesystem; \
    ln -s /workspace/node_modules/@modelcontextprotocol/server-filesystem/dist /opt/local_servers/filesystem/dist
