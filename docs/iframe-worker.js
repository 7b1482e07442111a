// Browsers start no worker on a page that was opened as a file. There the search runs in a hidden frame in its place, so
// that the site needs no server. Its name is the one by which mkdocs-material knows that it need not fetch another.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = "<!doctype html><title>search</title>"
      this.scope = new Promise((resolve, reject) => {
        this.frame.onload = () => {
          const scope = this.frame.contentWindow
          scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          const script = scope.document.createElement("script")
          Object.assign(script, { src: url, onload: () => resolve(scope), onerror: reject })
          scope.document.body.append(script)
        }
      })
      document.body.append(this.frame)
    }

    postMessage(data) {
      this.scope.then(scope => scope.dispatchEvent(new scope.MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
