FROM python:3.11-slim
WORKDIR /opt/isthmus
COPY . .
RUN pip install --no-cache-dir --require-hashes -r requirements.lock \
    && pip install --no-cache-dir --no-deps --no-build-isolation .
USER nobody
ENTRYPOINT ["isthmus"]
CMD ["proxy", "--config", "/etc/isthmus/proxy.toml"]
