// A browser starts no worker for a page that was opened from disk, and the search runs in a worker.
// There, this class takes its place: it runs the script of the worker in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.started = new Promise((resolve) => frame.addEventListener("load", resolve, { once: true }))
        .then(() => this.run(frame.contentWindow, url));
      document.documentElement.append(frame);
    }

    run(inside, url) {
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = url;
      const loaded = new Promise((resolve) => script.addEventListener("load", () => resolve(inside)));
      inside.document.head.append(script);
      return loaded;
    }

    async postMessage(data) {
      (await this.started).dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {}
  };
}
